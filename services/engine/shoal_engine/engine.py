"""The engine with its step thread: what both workers and the offline LLM run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic

from shoal_common.errors import Internal, Unavailable

from shoal_engine.commands import CommandQueue
from shoal_engine.core import EngineConfig, EngineCore
from shoal_engine.events import AdmitInfo, EngineSink, EngineStats
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows
from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.planner import WidthPlanner
from shoal_engine.requests import GenerationRequest, PrefillRequest

logger = logging.getLogger(__name__)

COMMAND_LIMIT = 1024
"""Commands that may wait for the step thread."""


class Engine(Generic[Hidden]):
    """One model served by one step thread. Every method may be called from any thread and does not block.

    Commands run between two steps, in the order they came; each returns a future of what the `EngineCore` method of the
    same name returns or raises. They raise CommandQueueFull, and Unavailable once the engine is closed.
    """

    def __init__(
        self,
        model: StepModel[Hidden],
        config: EngineConfig,
        sink: EngineSink,
        planner: WidthPlanner,
        *,
        command_limit: int = COMMAND_LIMIT,
    ) -> None:
        self._core = EngineCore(model, config, sink, planner)
        self._commands = CommandQueue(command_limit)
        self._stats = self._core.stats()
        self._thread = threading.Thread(target=self._loop, name="shoal-engine-step", daemon=True)

    def open(self) -> None:
        """Start the step thread. To be called once."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the running step; requests that are left fail with Unavailable.

        returns  False when the step did not end in time
        """
        self._commands.close()
        if self._thread.ident is None:
            self._end_waiting()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """False once the step thread has ended, by `close` or by an error that it could not survive."""
        return self._thread.is_alive()

    def admit(self, request: GenerationRequest | PrefillRequest) -> Future[AdmitInfo]:
        """See `EngineCore.admit`."""
        return self._commands.put(lambda: self._core.admit(request))

    def load_prefix(self, request_id: str, prefix: PrefixRows) -> Future[None]:
        """See `EngineCore.load_prefix`."""
        return self._commands.put(lambda: self._core.load_prefix(request_id, prefix))

    def load_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> Future[None]:
        """See `EngineCore.load_rows`."""
        return self._commands.put(lambda: self._core.load_rows(request_id, rows))

    def load_prompt(self, request_id: str, handover: HandoverRows) -> Future[None]:
        """See `EngineCore.load_prompt`."""
        return self._commands.put(lambda: self._core.load_prompt(request_id, handover))

    def start(self, request_id: str) -> Future[None]:
        """See `EngineCore.start`."""
        return self._commands.put(lambda: self._core.start(request_id))

    def finish(self, request_id: str, choice: int, end_index: int) -> Future[bool]:
        """See `EngineCore.finish`."""
        return self._commands.put(lambda: self._core.finish(request_id, choice, end_index), urgent=True)

    def cancel(self, request_id: str) -> Future[bool]:
        """See `EngineCore.cancel`."""
        return self._commands.put(lambda: self._core.cancel(request_id), urgent=True)

    def pause(self, request_id: str, choice: int) -> Future[None]:
        """See `EngineCore.pause`."""
        return self._commands.put(lambda: self._core.pause(request_id, choice), urgent=True)

    def resume(self, request_id: str, choice: int) -> Future[None]:
        """See `EngineCore.resume`."""
        return self._commands.put(lambda: self._core.resume(request_id, choice), urgent=True)

    def move(self, request_id: str) -> Future[None]:
        """See `EngineCore.move`."""
        return self._commands.put(lambda: self._core.move(request_id), urgent=True)

    def drain(self) -> Future[None]:
        """See `EngineCore.drain`."""
        return self._commands.put(self._core.drain, urgent=True)

    def undrain(self) -> Future[None]:
        """See `EngineCore.undrain`."""
        return self._commands.put(self._core.undrain, urgent=True)

    def stats(self) -> EngineStats:
        """Numbers as they stood after the last step or command."""
        return self._stats

    def _loop(self) -> None:
        try:
            while not self._commands.is_closed:
                self._commands.run_waiting()
                has_run = self._core.step()
                self._stats = self._core.stats()
                if not has_run:
                    self._commands.wait()
            self._core.fail_all(Unavailable("the engine is closing", reason="ENGINE_CLOSED"))
        except Exception:
            # Outside a step only a bug of the engine ends here; its state cannot be trusted any more.
            logger.exception("engine stopped")
            self._core.fail_all(Internal("the engine stopped"))
        finally:
            self._commands.close()
            self._end_waiting()
            self._stats = self._core.stats()

    def _end_waiting(self) -> None:
        self._commands.fail_waiting(Unavailable("the engine is closed", reason="ENGINE_CLOSED"))
