"""`shoal chat`: a small terminal chat."""

from __future__ import annotations

import argparse
import asyncio
import time

from shoal_client import SamplingParams

from shoal_cli import stack_state
from shoal_cli.ask import ask
from shoal_cli.errors import CliError
from shoal_cli.stack_args import add_mesh_flags, environment, run_dir_of
from shoal_cli.stack_spec import StackOptions


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `chat`."""
    parser = subparsers.add_parser("chat", help="talk to the model; Ctrl-C ends an answer, Ctrl-D the talk")
    add_mesh_flags(parser)
    parser.add_argument("--address", help="gRPC address of a gateway (the local mesh's)")
    parser.add_argument("--model", default="", help="which model (the server's default)")
    parser.add_argument("--system", help="instructions for the model")
    parser.add_argument("--temperature", type=float, help="0 takes the most probable token")
    parser.add_argument("--seed", type=int, help="same seed, same answers")
    parser.add_argument("--max-tokens", type=int, help="most tokens of one answer")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 at the end of the talk."""
    state = stack_state.read(run_dir_of(args))
    address = args.address or (state.grpc_address if state else StackOptions().grpc_address)
    try:
        sampling = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    except ValueError as error:
        raise CliError(f"--seed or --max-tokens: {error}") from error
    talk = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        if not line.strip():
            continue
        talk.append({"role": "user", "content": line})
        started_s = time.monotonic()
        api_key = environment().get("SHOAL_API_KEY")
        try:
            text, usage = asyncio.run(ask(address, talk, model=args.model, sampling=sampling, api_key=api_key))
        except KeyboardInterrupt:
            print("\n(stopped)")
            talk.pop()
            continue
        except CliError as error:
            print(f"shoal: {error}")
            talk.pop()
            continue
        talk.append({"role": "assistant", "content": text})
        elapsed_s = time.monotonic() - started_s
        print(
            f"  [{usage.prompt_tokens} in, {usage.cached_prompt_tokens} cached, {usage.completion_tokens} out, "
            f"{usage.completion_tokens / elapsed_s:.0f} tokens/s]"
        )
