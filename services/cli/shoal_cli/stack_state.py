"""The state file of a running local mesh: who runs, so that `shoal down` stops these and nobody else."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_STATE, _LOCK = "stack.json", "stack.lock"


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process by its id and the moment it started (kernel ticks since boot): ids are used again, pairs are not."""

    name: str
    pid: int
    started_ticks: int

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessRef:
        """The process that has this id now. Raises ProcessLookupError if there is none."""
        ticks = _started_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(pid)
        return cls(name, pid, ticks)

    @property
    def is_alive(self) -> bool:
        """True while this very process runs."""
        return _started_ticks(self.pid) == self.started_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What runs and where to reach it. Addresses are empty until `is_up`."""

    supervisor: ProcessRef
    processes: tuple[ProcessRef, ...]
    mesh: str
    nats_url: str
    http_address: str
    grpc_address: str
    is_up: bool


def default_run_dir(environ: Mapping[str, str], mesh: str) -> Path:
    """Where state and logs of a mesh lie: SHOAL_CLI_RUN_DIR, else shoal/<mesh> in the user's XDG state folder."""
    if chosen := environ.get("SHOAL_CLI_RUN_DIR"):
        return Path(chosen)
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "shoal" / mesh


def make_run_dir(run_dir: Path) -> None:
    """Create it for this user alone: state and logs may name credentials of the bus."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def read(run_dir: Path) -> StackState | None:
    """The state as last written; None if there is none, or nothing of it runs any more."""
    try:
        values = json.loads((run_dir / _STATE).read_text(encoding="utf-8"))
        refs = tuple(ProcessRef(**one) for one in values.pop("processes"))
        state = StackState(supervisor=ProcessRef(**values.pop("supervisor")), processes=refs, **values)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return state if any(one.is_alive for one in (state.supervisor, *state.processes)) else None


def write(run_dir: Path, state: StackState) -> None:
    """Replace the state, whole or not at all."""
    fresh = run_dir / (_STATE + ".new")
    fresh.write_text(json.dumps(dataclasses.asdict(state), indent=2), encoding="utf-8")
    fresh.replace(run_dir / _STATE)


def remove(run_dir: Path) -> None:
    """Nothing runs any more."""
    (run_dir / _STATE).unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[bool]:
    """Hold the folder for one supervisor. Yields False if another one holds it; freed by the kernel if we die."""
    make_run_dir(run_dir)
    with open(run_dir / _LOCK, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _started_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return _without_proc(pid)
    # The name may hold spaces and parentheses; what follows its last parenthesis begins with field 3.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _without_proc(pid: int) -> int | None:
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return 0
