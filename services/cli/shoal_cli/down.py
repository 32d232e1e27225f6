"""`shoal down`: stop the local mesh, and nothing else."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Sequence

from shoal_cli import stack_state
from shoal_cli.stack_args import add_mesh_flags, run_dir_of
from shoal_cli.stack_state import ProcessRef

_POLL_S = 0.05
_SUPERVISOR_STOPS_WITHIN_S = 30.0
_ORPHAN_STOPS_WITHIN_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `down`."""
    add_mesh_flags(subparsers.add_parser("down", help="stop the local mesh"))


def run(args: argparse.Namespace) -> int:
    """Exit status 0, also if nothing was up."""
    run_dir = run_dir_of(args)
    state = stack_state.read(run_dir)
    if state is None:
        print(f"no mesh is up ({run_dir})")
        return 0
    stop_all([state.supervisor], _SUPERVISOR_STOPS_WITHIN_S)
    # A supervisor that was killed left its processes behind; one that was stopped left none.
    stop_all(state.processes, _ORPHAN_STOPS_WITHIN_S)
    stack_state.remove(run_dir)
    print("stopped")
    return 0


def stop_all(processes: Sequence[ProcessRef], timeout_s: float) -> None:
    """SIGTERM, then SIGKILL to those that are left. A process id that now means another process is left alone."""
    for number, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
        for one in processes:
            if one.is_alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, number)
        give_up = time.monotonic() + patience_s
        while any(one.is_alive for one in processes) and time.monotonic() < give_up:
            time.sleep(_POLL_S)
