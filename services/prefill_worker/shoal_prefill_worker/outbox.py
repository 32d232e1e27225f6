"""From the engine's thread to the call that waits: rows, the end, a failure, in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_common.errors import MeshError
from shoal_engine.events import ChoiceEnd, EngineUsage, TokenEntry
from shoal_engine.logical_rows import LogicalRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are final now."""

    rows: Sequence[LogicalRows]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """All rows are out. hidden_row: bf16; computed_tokens: prompt tokens that ran through the encoder."""

    hidden_row: bytes
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine gave the prompt up."""

    error: MeshError


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """New full blocks, for kv_cache."""

    first_block_index: int
    blocks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A new snapshot, for kv_cache."""

    position: int
    rows: bytes


Event = Rows | Prefilled | Failed | FullBlocks | Snapshot


class Outbox:
    """EngineSink of a prefill worker: hands each event to the receiver of its key on the event loop.

    Events of a key without a receiver are dropped. What can wait is bounded by the prompts in the engine.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._receivers: dict[str, Callable[[Event], None]] = {}

    def listen(self, key: str, receiver: Callable[[Event], None]) -> None:
        """Call `receiver` on the loop for events of `key`, until `forget`."""
        self._receivers[key] = receiver

    def forget(self, key: str) -> None:
        """Nobody waits any more. Safe to repeat."""
        self._receivers.pop(key, None)

    def on_prefill_rows(self, request_id: str, rows: Sequence[LogicalRows]) -> None:
        """EngineSink."""
        self._post(request_id, Rows(rows))

    def on_prefilled(self, request_id: str, hidden_row: bytes, computed_tokens: int) -> None:
        """EngineSink."""
        self._post(request_id, Prefilled(hidden_row, computed_tokens))

    def on_failed(self, request_id: str, attempt: int, error: MeshError, next_indices: Sequence[int]) -> None:
        """EngineSink."""
        self._post(request_id, Failed(error))

    def on_full_blocks(
        self, request_id: str, choice: int | None, first_block_index: int, blocks: Sequence[bytes]
    ) -> None:
        """EngineSink."""
        self._post(request_id, FullBlocks(first_block_index, blocks))

    def on_snapshot(self, request_id: str, choice: int | None, position: int, rows: bytes) -> None:
        """EngineSink."""
        self._post(request_id, Snapshot(position, rows))

    def on_tokens(self, step: int, entries: Sequence[TokenEntry]) -> None:
        """EngineSink; prompts alone give no tokens."""

    def on_ended(self, request_id: str, attempt: int, ends: Sequence[ChoiceEnd], usage: EngineUsage) -> None:
        """EngineSink; prompts alone end with on_prefilled."""

    def _post(self, key: str, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, key, event)
        except RuntimeError:
            # The loop is closed: the process ends, nobody waits.
            logger.debug("engine event after the end", extra={"event": type(event).__name__})

    def _deliver(self, key: str, event: Event) -> None:
        receiver = self._receivers.get(key)
        if receiver is not None:
            receiver(event)
