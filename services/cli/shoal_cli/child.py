"""One supervised child process: its ready line, its log file, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from shoal_cli.errors import CliError
from shoal_cli.stack_spec import ProcessSpec
from shoal_cli.stack_state import ProcessRef

_LAST_BYTES = 8192


class Child:
    """Runs in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor, which then stops it.

    Standard error goes to the log file, standard output too once the ready line has come.
    """

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = spec.name
        self.ref = ProcessRef.of(spec.name, process.pid)
        self._process, self._log = process, log
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: ProcessSpec, log_dir: Path) -> Child:
        """Start it. Raises CliError if the program cannot be run."""
        log = log_dir / f"{spec.name}.log"
        with _opened(log, "wb") as errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env=dict(spec.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise CliError(f"{spec.name} cannot be started: {error}") from error
        return cls(spec, process, log)

    async def ready(self) -> Mapping[str, str]:
        """Wait for the ready line and return its fields. Raises CliError with its last words if it ends before."""
        output = self._process.stdout
        if output is None:
            raise RuntimeError("standard output is a pipe")
        while line := await output.readline():
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict) and fields.get("event") == "ready":
                    self._drain = asyncio.create_task(self._drain_output(output))
                    return {str(key): str(value) for key, value in fields.items()}
        await self._process.wait()
        raise CliError(f"{self.name} did not start: {self.last_words()} (log: {self._log})")

    async def ended(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        return await self._process.wait()

    def last_words(self) -> str:
        """The signal that killed it, or the line in which it said why it ended, else its last one."""
        status = self._process.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        with open(self._log, "rb") as log:
            log.seek(max(0, os.path.getsize(self._log) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("shoal ")] or [line for line in lines if line.strip()]
        return said[-1].strip() if said else f"exit status {self._process.returncode}"

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL to its whole group if it has not ended in time. Does nothing to a stranger's process."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        # Its own children share the group; they go too, also when it ended by itself.
        self._signal(signal.SIGKILL, group=True)
        await self._process.wait()
        if self._drain is not None:
            self._drain.cancel()

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.ref.pid, number)
            else:
                self._process.send_signal(number)

    async def _drain_output(self, output: asyncio.StreamReader) -> None:
        with _opened(self._log, "ab") as log:
            while chunk := await output.read(65536):
                log.write(chunk)
                log.flush()


def _opened(log: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Log files are local and small writes to them do not block, so the event loop may do them."""
    return open(log, mode)
