"""`shoal up`: the local mesh in the background."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal_cli import stack_state
from shoal_cli.errors import REFUSAL, CliError
from shoal_cli.run import UP
from shoal_cli.stack_args import add_stack_flags, environment, mesh_of, options_of, run_dir_of

_POLL_S = 0.05
_MARGIN_S = 30.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `up`."""
    add_stack_flags(subparsers.add_parser("up", help="start the local mesh in the background"))


def run(args: argparse.Namespace) -> int:
    """Start a detached `shoal run` and show its progress until it is up. Its bad start is ours."""
    options, run_dir = options_of(args), run_dir_of(args)
    command = [sys.executable, "-P", "-m", "shoal_cli", "run", "--no-ask", "--mesh", mesh_of(args)]
    command += ["--run-dir", str(run_dir), "--http", options.http_address, "--grpc", options.grpc_address]
    command += ["--ready-timeout", str(options.ready_timeout_s)]
    if options.model is not None:
        command += ["--model", str(options.model)]
    return follow(command, run_dir, environ=environment(), timeout_s=options.ready_timeout_s + _MARGIN_S)


def follow(command: list[str], run_dir: Path, *, environ: Mapping[str, str], timeout_s: float) -> int:
    """Start the supervisor, echo what it says until its mesh is up. Raises CliError with its last words if it ends."""
    stack_state.make_run_dir(run_dir)
    (run_dir / "logs").mkdir(exist_ok=True)
    log = run_dir / "logs" / f"supervisor-{time.time_ns()}.log"
    with open(log, "w", encoding="utf-8") as sink:
        supervisor = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    give_up = time.monotonic() + timeout_s
    last_line, unended = f"the supervisor ended (log: {log})", ""
    with open(log, encoding="utf-8") as said:
        while True:
            ended = supervisor.poll() is not None
            words = unended + said.read()
            lines = words.splitlines(keepends=True)
            unended = lines.pop() if lines and not ended and not lines[-1].endswith("\n") else ""
            last_line = next((line.rstrip("\n") for line in reversed(lines) if line.strip()), last_line)
            if ended:
                raise CliError(last_line.removeprefix(REFUSAL))
            # The supervisor does not know that nobody can press its Ctrl-C, and why it ends is told once, by us.
            shown = [line for line in lines if line != UP + "\n" and not line.startswith(REFUSAL)]
            print("".join(shown), end="", flush=True)
            state = stack_state.read(run_dir)
            if state is not None and state.is_up and state.supervisor.pid == supervisor.pid:
                print(f"up: http://{state.http_address}   gRPC {state.grpc_address}   logs {run_dir / 'logs'}")
                return 0
            if time.monotonic() > give_up:
                supervisor.terminate()
                supervisor.wait(_MARGIN_S)
                raise CliError(f"not up within {timeout_s:g} s (log: {log})")
            time.sleep(_POLL_S)
