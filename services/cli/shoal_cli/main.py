"""The `shoal` command: finds the subcommand and imports only that one.

A subcommand is a module with `add_parser(subparsers)`, which adds the parser of its name, and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from shoal_cli.errors import REFUSAL, CliError

COMMANDS = {
    "run": ("shoal_cli.run", "start the local mesh, ask one question, stay up until Ctrl-C"),
    "up": ("shoal_cli.up", "start the local mesh in the background"),
    "down": ("shoal_cli.down", "stop the local mesh"),
    "status": ("shoal_cli.status", "show the live instances and their load"),
    "chat": ("shoal_cli.chat", "talk to the model"),
    "key": ("shoal_cli.key", "make API keys for the gateway"),
    "kv": ("shoal_cli.kv", "look at the KV cache, flush it, check it"),
    "model": ("shoal_cli.model", "inspect and run a checkpoint without any service"),
}

_BROKEN_PIPE = 141
"""What a shell shows for a command that SIGPIPE ended."""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status. An error for people is one line and status 2."""
    parser = argparse.ArgumentParser(prog="shoal", formatter_class=argparse.RawDescriptionHelpFormatter)
    if not argv or argv[0] not in COMMANDS:
        lines = [f"  {name:8}{text}" for name, (_, text) in COMMANDS.items()]
        parser.epilog = "commands (shoal COMMAND --help tells more):\n" + "\n".join(lines)
        parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
        parser.parse_args(argv or ["--help"])
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    module.add_parser(parser.add_subparsers())
    try:
        status: int = module.run(parser.parse_args(argv))
    except CliError as error:
        print(f"{REFUSAL}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def entry() -> None:
    """The console script."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read this (`| head`) has seen enough. Without another stdout Python would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _BROKEN_PIPE
    sys.exit(status)
