"""Everything a model remembers between steps, as logical rows: what hand-over, snapshots and the KV cache exchange."""

from __future__ import annotations

from torch import Tensor

from shoal_model.pages import PagedCache
from shoal_model.state import StateSlots


class ModelCache:
    """Blocks and state slots of one model instance, addressed by block id, slot and position.

    `encoder_layers`, `decoder_layers` and `draft_layers` are the layer ranges that the window methods take.
    """

    def __init__(
        self, pages: PagedCache, state: StateSlots, *, encoder_layers: range, decoder_layers: range, draft_layers: range
    ) -> None:
        self.pages = pages
        self.state = state
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.draft_layers = draft_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.pages.layout.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks, the reserved block 0 included."""
        return self.pages.num_blocks

    @property
    def num_slots(self) -> int:
        """State slots."""
        return self.state.num_slots

    def clear_slot(self, slot: int) -> None:
        """A new sequence starts in this slot."""
        self.state.clear(slot)

    def copy_slot(self, source: int, target: int) -> None:
        """See `StateSlots.copy`."""
        self.state.copy(source, target)

    def copy_block(self, source: int, target: int) -> None:
        """See `PagedCache.copy_block`."""
        self.pages.copy_block(source, target)

    def read_block(self, block_id: int) -> bytes:
        """See `PagedCache.read_block`."""
        return self.pages.read_block(block_id)

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        """See `PagedCache.write_block`."""
        self.pages.write_block(block_id, data)

    def read_entries(self, block_id: int, num_tokens: int) -> bytes:
        """See `PagedCache.read_entries`."""
        return self.pages.read_entries(block_id, num_tokens)

    def write_entries(self, block_id: int, num_tokens: int, data: bytes | memoryview) -> None:
        """See `PagedCache.write_entries`."""
        self.pages.write_entries(block_id, num_tokens, data)

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one window record."""
        return self.state.window_row_bytes

    def has_window(self, slot: int, layers: range, low: int, high: int) -> bool:
        """See `StateSlots.has_window`."""
        return self.state.has_window(slot, layers, low, high)

    def read_window(self, slot: int, layers: range, low: int, high: int) -> Tensor:
        """See `StateSlots.read_window`."""
        return self.state.read_window(slot, layers, low, high)

    def write_window(self, slot: int, layers: range, low: int, records: Tensor) -> None:
        """See `StateSlots.write_window`."""
        self.state.write_window(slot, layers, low, records)

    def read_open_pair(self, slot: int, position: int) -> Tensor:
        """See `StateSlots.read_open_pair`."""
        return self.state.read_open_pair(slot, position)

    def write_open_pair(self, slot: int, position: int, values: Tensor) -> None:
        """See `StateSlots.write_open_pair`."""
        self.state.write_open_pair(slot, position, values)
