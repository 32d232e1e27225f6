"""`shoal run`: the local mesh in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from shoal_cli import stack_state
from shoal_cli.ask import ask
from shoal_cli.errors import REFUSAL, CliError
from shoal_cli.ports import check_free
from shoal_cli.stack_args import add_stack_flags, environment, options_of, run_dir_of
from shoal_cli.stack_spec import ProcessSpec, StackOptions, service_specs
from shoal_cli.supervisor import Specs, Supervisor

QUESTION = "Sort these numbers: 42 7 19 3"
UP = "up; Ctrl-C stops it"
_POLL_S = 0.1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `run`."""
    parser = subparsers.add_parser("run", help="start the local mesh, ask one question, stay up until Ctrl-C")
    add_stack_flags(parser)
    parser.add_argument("--ask", default=QUESTION, metavar="TEXT", help="the question")
    parser.add_argument("--no-ask", action="store_true", help="ask nothing")
    parser.add_argument("--once", action="store_true", help="exit after the answer")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 after Ctrl-C or, with --once, after the answer; 1 if a process failed; CliError for a bad start."""
    options = options_of(args)

    def specs(nats_url: str) -> tuple[ProcessSpec, ...]:
        return service_specs(options, environment(), nats_url=nats_url)

    question = None if args.no_ask else str(args.ask)
    return supervise(options, run_dir=run_dir_of(args), specs=specs, question=question, once=args.once)


def supervise(options: StackOptions, *, run_dir: Path, specs: Specs, question: str | None, once: bool) -> int:
    """Run the mesh that `specs` describes until it is told to stop or fails. One per `run_dir`."""
    with stack_state.claimed(run_dir) as is_ours:
        if not is_ours:
            raise CliError(_already_up(run_dir))
        left_over = stack_state.read(run_dir)
        if left_over is not None:
            raise CliError(f"processes of a mesh whose supervisor died still run; `shoal down` stops them ({run_dir})")
        check_free(options.http_address, "--http")
        check_free(options.grpc_address, "--grpc")
        return asyncio.run(_supervise(options, run_dir=run_dir, specs=specs, question=question, once=once))


def _already_up(run_dir: Path) -> str:
    state = stack_state.read(run_dir)
    if state is None or not state.is_up:
        return f"another `shoal` is starting or stopping this mesh ({run_dir})"
    return f"the mesh is up already on http://{state.http_address} (pid {state.supervisor.pid}); `shoal down` stops it"


async def _supervise(options: StackOptions, *, run_dir: Path, specs: Specs, question: str | None, once: bool) -> int:
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(_work(options, run_dir=run_dir, specs=specs, question=question, once=once))

    def interrupt() -> None:
        # Only once: what stops the processes must not be cancelled in its turn.
        if not work.cancelling():
            work.cancel()
            # The terminal may be what went away.
            with contextlib.suppress(OSError):
                say("stopping")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        return await work
    except asyncio.CancelledError:
        say("stopped")
        return 130 if once else 0


async def _work(options: StackOptions, *, run_dir: Path, specs: Specs, question: str | None, once: bool) -> int:
    async with Supervisor(options, run_dir=run_dir, environ=environment(), specs=specs, say=say) as mesh:
        failed = asyncio.create_task(mesh.failed())
        try:
            serving = asyncio.create_task(_serve(options, mesh, question))
            await asyncio.wait({failed, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not failed.done():
                await serving
                if once:
                    return 0
                say(UP)
            say(f"{REFUSAL}{await failed}", error=True)
            return 1
        finally:
            failed.cancel()
            serving.cancel()


async def _serve(options: StackOptions, mesh: Supervisor, question: str | None) -> None:
    edge = mesh.ready_fields("gateway")
    await _wait_served(edge["admin"], options.ready_timeout_s)
    mesh.mark_up()
    say(f"\nhttp://{edge.get('http', options.http_address)}   gRPC {edge['address']}\n")
    if question is not None:
        say(f"> {question}")
        await ask(edge["address"], question, api_key=environment().get("SHOAL_API_KEY"))


async def _wait_served(admin_address: str, timeout_s: float) -> None:
    """Wait until a request would be served, telling what it waits for."""
    give_up, told = time.monotonic() + timeout_s, ""
    while missing := await asyncio.to_thread(_missing, admin_address):
        if missing != told:
            say(f"waiting for     {missing} (a first start compiles the kernels: a minute, on a GPU some minutes)")
            told = missing
        if time.monotonic() > give_up:
            raise CliError(f"the gateway does not serve within {timeout_s:g} s, it waits for: {missing}")
        await asyncio.sleep(_POLL_S)


def _missing(admin_address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{admin_address}/readyz", timeout=2):
            return ""
    except urllib.error.HTTPError as error:
        return _told(error.read().decode(errors="replace").strip())
    except OSError as error:
        return str(error)


def _told(page: str) -> str:
    """What a /readyz page says is missing; the page itself if it says it in another form."""
    try:
        return ", ".join(json.loads(page)["missing"])
    except (ValueError, KeyError, TypeError):
        return page


def say(text: str, *, error: bool = False) -> None:
    """One line of progress or, on standard error, of failure."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
