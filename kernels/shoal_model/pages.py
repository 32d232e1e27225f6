"""The paged cache of one rank: blocks of compressed entries, and their bytes in and out."""

from __future__ import annotations

import torch
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import RowFormat
from torch import Tensor

from shoal_model.kv_layout import BLOCK_TOKENS, KvLayout, KvSection


class PagedCache:
    """`num_blocks` blocks laid out by a `KvLayout`. Block 0 is the null block: reserved, never a sequence's.

    The cache knows nothing of sequences; who may write which block is the engine's to decide.
    """

    def __init__(
        self,
        layout: KvLayout,
        main: RowFormat,
        index: RowFormat,
        *,
        num_blocks: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self._storage = torch.zeros((num_blocks, layout.block_units), dtype=main.storage_dtype, device=device)
        self._main = {o.layer: self._rows(o.main, main) for o in layout.owners}
        self._index = {o.layer: self._rows(o.index, index) for o in layout.owners}

    def main(self, owner_layer: int) -> PagedRows:
        """Main entries of one owner layer."""
        return self._main[owner_layer]

    def index(self, owner_layer: int) -> PagedRows:
        """Index keys of one owner layer."""
        return self._index[owner_layer]

    def read_block(self, block_id: int) -> bytes:
        """All `layout.block_bytes` bytes of a block."""
        return self._storage[self._checked(block_id)].cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        """Replace a block. Raises ValueError for a wrong length."""
        _expect(len(data), self.layout.block_bytes, f"block {block_id}")
        units = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self._storage.dtype)
        self._storage[self._checked(block_id)] = units.to(self._storage.device)

    def copy_block(self, source: int, target: int) -> None:
        """Make block `target` hold what block `source` holds."""
        self._storage[self._checked(target)] = self._storage[self._checked(source)]

    def read_entries(self, block_id: int, num_tokens: int) -> bytes:
        """Logical rows of a block's first `num_tokens` tokens: per owner its index rows, then its main rows."""
        parts = []
        for rows, count in self._parts(num_tokens):
            blocks, slots = self._addresses(block_id, count)
            parts.append(rows.read_bytes(blocks, slots).cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def write_entries(self, block_id: int, num_tokens: int, data: bytes | memoryview) -> None:
        """Inverse of `read_entries`. Raises ValueError for a wrong length, then writes nothing."""
        _expect(len(data), self.layout.entries_bytes(num_tokens), f"entries of {num_tokens} tokens")
        if not len(data):
            return
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        units = payload.view(self._storage.dtype)
        offset = 0
        for rows, count in self._parts(num_tokens):
            size = count * rows.format.units
            blocks, slots = self._addresses(block_id, count)
            part = units[offset : offset + size].view(count, rows.format.units)
            rows.write_bytes(blocks, slots, part.to(self._storage.device))
            offset += size

    def _rows(self, section: KvSection, row_format: RowFormat) -> PagedRows:
        return PagedRows(
            self._storage,
            offset=section.offset,
            entries_per_block=section.num_entries,
            format=row_format,
            page_split=section.page_split,
        )

    def _parts(self, num_tokens: int) -> list[tuple[PagedRows, int]]:
        if not 0 <= num_tokens <= BLOCK_TOKENS:
            raise ValueError(f"num_tokens must be in [0, {BLOCK_TOKENS}], got {num_tokens}")
        parts: list[tuple[PagedRows, int]] = []
        for owner in self.layout.owners:
            count = num_tokens // owner.ratio
            parts += [(self._index[owner.layer], count), (self._main[owner.layer], count)]
        return parts

    def _addresses(self, block_id: int, count: int) -> tuple[Tensor, Tensor]:
        device = self._storage.device
        blocks = torch.full((count,), self._checked(block_id), dtype=torch.int64, device=device)
        return blocks, torch.arange(count, device=device)

    def _checked(self, block_id: int) -> int:
        if not 0 < block_id < self.num_blocks:
            raise ValueError(f"block id {block_id} is not in [1, {self.num_blocks})")
        return block_id


def _expect(got: int, want: int, what: str) -> None:
    if got != want:
        raise ValueError(f"{what}: {want} bytes expected, got {got}")
