"""Starts the processes of the local mesh, watches them, and stops them all, whatever happens."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal_common.settings import without_credentials

from shoal_cli import nats_local, stack_state
from shoal_cli.child import Child
from shoal_cli.errors import CliError
from shoal_cli.stack_spec import ProcessSpec, StackOptions
from shoal_cli.stack_state import ProcessRef, StackState

Say = Callable[[str], None]
Specs = Callable[[str], Sequence[ProcessSpec]]
"""From the URL of NATS to the processes to start."""


class Supervisor:
    """One local mesh. Use as `async with`: whatever ends the block stops what was started, NATS last.

    Invariant: every process started is in the state file before anything is awaited that could fail.
    """

    def __init__(self, options: StackOptions, *, run_dir: Path, environ: Mapping[str, str], specs: Specs, say: Say):
        self._options, self._run_dir, self._environ = options, run_dir, environ
        self._specs, self._say = specs, say
        self._nats: Child | None = None
        self._nats_url = ""
        self._children: list[Child] = []
        self._ready: dict[str, Mapping[str, str]] = {}

    async def __aenter__(self) -> Supervisor:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def nats_url(self) -> str:
        """Where the mesh's NATS is."""
        return self._nats_url

    def ready_fields(self, name: str) -> Mapping[str, str]:
        """The ready line of one process. Raises KeyError for one that is not part of this mesh."""
        return self._ready[name]

    async def failed(self) -> str:
        """Wait until one of the processes ends by itself; says which and its last words."""
        children = [*self._children, *([self._nats] if self._nats else [])]
        waits = {asyncio.create_task(child.ended()): child for child in children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        child = waits[done.pop()]
        return f"{child.name} ended unexpectedly: {child.last_words()}"

    def mark_up(self) -> None:
        """Requests are served from now on."""
        self._write_state(is_up=True)

    async def _start(self) -> None:
        (self._run_dir / "logs").mkdir(exist_ok=True)
        started_s = time.monotonic()
        given = self._environ.get("SHOAL_NATS_URL")
        if given:
            await nats_local.reach(given)
            self._nats_url = given
        else:
            self._nats, self._nats_url = await nats_local.start(self._run_dir, self._environ, timeout_s=10.0)
            self._write_state(is_up=False)
        self._say(f"nats            {without_credentials(self._nats_url)}")
        for spec in self._specs(self._nats_url):
            self._children.append(await Child.start(spec, self._run_dir / "logs"))
            self._write_state(is_up=False)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s), asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._wait_ready(child, started_s))
        except TimeoutError:
            late = ", ".join(child.name for child in self._children if child.name not in self._ready)
            raise CliError(f"not ready within {self._options.ready_timeout_s:g} s: {late}") from None
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _wait_ready(self, child: Child, started_s: float) -> None:
        fields = await child.ready()
        self._ready[child.name] = fields
        where = fields.get("address", "")
        self._say(f"{child.name:16}{where:24}{time.monotonic() - started_s:5.1f} s")

    async def _stop(self) -> None:
        await asyncio.gather(*(child.stop(self._options.stop_timeout_s) for child in self._children))
        if self._nats is not None:
            await self._nats.stop(self._options.stop_timeout_s)
        stack_state.remove(self._run_dir)

    def _write_state(self, *, is_up: bool) -> None:
        children = [*([self._nats] if self._nats else []), *self._children]
        edge = self._ready.get("gateway", {})
        stack_state.write(
            self._run_dir,
            StackState(
                supervisor=ProcessRef.of("supervisor", os.getpid()),
                processes=tuple(child.ref for child in children),
                mesh=self._options.mesh,
                nats_url=self._nats_url,
                http_address=edge.get("http", self._options.http_address),
                grpc_address=edge.get("address", self._options.grpc_address),
                is_up=is_up,
            ),
        )
