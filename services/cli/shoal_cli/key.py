"""`shoal key new|hash`: API keys for the gateway. The gateway's file holds hashes; a key itself is shown once."""

from __future__ import annotations

import argparse
import getpass
import sys

from shoal_common import api_keys

from shoal_cli.errors import CliError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `key` and its subcommands."""
    parser = subparsers.add_parser("key", help="make API keys, and the hashes that the gateway keeps of them")
    commands = parser.add_subparsers(dest="key_command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make a key; prints it, and its entry for the keys file")
    new.add_argument("name", help="of the key in the file, in logs and metrics")
    commands.add_parser("hash", help="the hash of a key, read from standard input: command lines are public")


def run(args: argparse.Namespace) -> int:
    """The key goes to standard error and its entry to standard output, so that `>> keys.toml` takes the right one."""
    if args.key_command == "new":
        if not api_keys.KEY_NAME.fullmatch(args.name):
            raise CliError(f"a name has {api_keys.KEY_NAME_FORM}")
        key = api_keys.new_key()
        print(f"{key}\nThis is the only time that it is shown. For the keys file:", file=sys.stderr, flush=True)
        print(f'[keys.{args.name}]\nhash = "{api_keys.hash_of(key)}"')
        return 0
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        print(api_keys.hash_of(key.strip()))
    except ValueError as error:
        raise CliError(str(error)) from error
    return 0
