"""What a prefill call needs from an engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from shoal_engine.events import AdmitInfo, EngineStats
from shoal_engine.logical_rows import PrefixRows
from shoal_engine.requests import PrefillRequest


class PrefillEngine(Protocol):
    """The part of `shoal_engine.engine.Engine` used here; its methods may be called from any thread."""

    def admit(self, request: PrefillRequest) -> Future[AdmitInfo]: ...

    def load_prefix(self, request_id: str, prefix: PrefixRows) -> Future[None]: ...

    def start(self, request_id: str) -> Future[None]: ...

    def cancel(self, request_id: str) -> object: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> bool: ...

    @property
    def is_running(self) -> bool: ...
