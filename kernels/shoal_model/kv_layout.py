"""Where the records of one 128-token block lie: every KV owner's index keys and main entries, back to back.

Source: v41-flash.md section 8.1. Sizes are in storage units of the record formats: bytes for the released formats,
elements for uncast precisions. The released layout is 113,920 bytes, 890 a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_kernels.row_formats import RowFormat

BLOCK_TOKENS = 128
"""Tokens in a block, in every model."""

_SECTION_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSection:
    """The records of one kind (index keys or main entries) that one owner layer keeps in a block."""

    offset: int  # units from the start of the block
    num_entries: int  # entries in a full block
    row_units: int  # units of one record
    page_split: bool  # all data units of the section first, then all scale units

    @property
    def used_units(self) -> int:
        """Units that hold records, without the padding behind them."""
        return self.num_entries * self.row_units


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOwner:
    """A layer that owns compressed KV: its ratio (tokens per entry) and its two sections."""

    layer: int
    ratio: int
    index: KvSection
    main: KvSection


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Layout of one block over all owners, in layer order.

    Invariant: sections follow each other without overlap, each padded to 32 units, and end at `block_units`.
    """

    owners: tuple[KvOwner, ...]
    block_units: int
    unit_bytes: int

    @classmethod
    def build(cls, owners: Sequence[tuple[int, int]], main: RowFormat, index: RowFormat) -> KvLayout:
        """Lay out `owners`, pairs of (layer, ratio). Raises ValueError where a ratio does not divide a block."""
        placed: list[KvOwner] = []
        offset = 0
        for layer, ratio in owners:
            if ratio < 1 or BLOCK_TOKENS % ratio:
                raise ValueError(f"layer {layer}: ratio {ratio} does not divide a block of {BLOCK_TOKENS} tokens")
            entries = BLOCK_TOKENS // ratio
            index_section = KvSection(offset=offset, num_entries=entries, row_units=index.units, page_split=True)
            offset += _aligned(index_section.used_units)
            main_section = KvSection(offset=offset, num_entries=entries, row_units=main.units, page_split=False)
            offset += _aligned(main_section.used_units)
            placed.append(KvOwner(layer=layer, ratio=ratio, index=index_section, main=main_section))
        return cls(owners=tuple(placed), block_units=offset, unit_bytes=main.storage_dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in memory and on the wire."""
        return self.block_units * self.unit_bytes

    def entries_bytes(self, num_tokens: int) -> int:
        """Bytes of the logical rows of the first `num_tokens` tokens of a block (only complete groups count)."""
        units = sum(num_tokens // o.ratio * (o.index.row_units + o.main.row_units) for o in self.owners)
        return units * self.unit_bytes


def _aligned(units: int) -> int:
    return -(-units // _SECTION_ALIGNMENT) * _SECTION_ALIGNMENT
