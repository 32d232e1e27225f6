"""A view of one section of the paged cache: the records of one owner layer in every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows
from shoal_kernels.registry import resolve
from shoal_kernels.row_formats import RowFormat


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Records of one owner layer, `entries_per_block` in each block.

    storage     [num_blocks, block_units] in the format's storage dtype, contiguous; shared by all sections of a block
    offset      first unit of the section inside a block
    page_split  True: [entries x data][entries x scales] (index keys); False: records side by side (main KV)

    Entry g of a sequence lies in slot g % entries_per_block of block table entry g // entries_per_block.
    """

    storage: Tensor
    offset: int
    entries_per_block: int
    format: RowFormat
    page_split: bool

    def __post_init__(self) -> None:
        if self.storage.dtype != self.format.storage_dtype or self.storage.dim() != 2:
            raise ValueError(f"storage must be {self.format.storage_dtype} [blocks, units], got {self.storage.dtype}")
        if not self.storage.is_contiguous():
            raise ValueError("storage must be contiguous")
        if self.offset < 0 or self.offset + self.section_units > self.storage.shape[1]:
            raise ValueError(f"section [{self.offset}, +{self.section_units}) exceeds {self.storage.shape[1]} units")

    @property
    def section_units(self) -> int:
        """Units of this section in one block."""
        return self.entries_per_block * self.format.units

    @property
    def layout(self) -> tuple[int, int, int, int, int]:
        """offset, entries_per_block, data_units, scale_units, page_split: where a compiled kernel finds a record."""
        units = self.format
        return self.offset, self.entries_per_block, units.data_units, units.scale_units, int(self.page_split)

    def write(self, block_ids: Tensor, slots: Tensor, values: Tensor) -> None:
        """Encode values [n, dim] into (block_ids int64 [n], slots int64 [n]). Each place at most once per call.

        Raises ValueError for shape or dtype, or for a place outside the storage.
        """
        count = block_ids.shape[0]
        check_rows("block_ids", block_ids, None, dtype=torch.int64)
        check_rows("slots", slots, count, dtype=torch.int64)
        check_rows("values", values, count, self.format.dim, dtype=self.format.precision.dtype)
        check_index("block_ids", block_ids, 0, self.storage.shape[0])
        check_index("slots", slots, 0, self.entries_per_block)
        if not self.format.is_cast:
            self.write_bytes(block_ids, slots, values)
            return
        resolve("write_records", values.device.type, self.format.precision)(self, block_ids, slots, values)

    def read(self, block_ids: Tensor, slots: Tensor) -> Tensor:
        """Decoded values [n, dim] of the records at (block_ids [n], slots [n])."""
        return self.format.decode(self.read_bytes(block_ids, slots))

    def write_bytes(self, block_ids: Tensor, slots: Tensor, records: Tensor) -> None:
        """Store logical records [n, units] (data then scales, whatever the page layout)."""
        if records.shape != (block_ids.shape[0], self.format.units):
            raise ValueError(f"records must be [{block_ids.shape[0]}, {self.format.units}], got {list(records.shape)}")
        data, scales = self._sections()
        data[block_ids, slots] = records[:, : self.format.data_units]
        if self.format.scale_units:
            scales[block_ids, slots] = records[:, self.format.data_units :]

    def read_bytes(self, block_ids: Tensor, slots: Tensor) -> Tensor:
        """Logical records [n, units] (data then scales, whatever the page layout)."""
        data, scales = self._sections()
        return torch.cat((data[block_ids, slots], scales[block_ids, slots]), dim=1)

    def _sections(self) -> tuple[Tensor, Tensor]:
        """Strided views [num_blocks, entries, data_units] and [num_blocks, entries, scale_units]."""
        blocks, block_units = self.storage.shape
        n, layout = self.entries_per_block, self.format
        data_step, scale_step = (layout.data_units, layout.scale_units) if self.page_split else (layout.units,) * 2
        scale_offset = self.offset + (n * layout.data_units if self.page_split else layout.data_units)
        if not layout.scale_units:
            scale_offset = self.offset
        data = self.storage.as_strided((blocks, n, layout.data_units), (block_units, data_step, 1), self.offset)
        scales = self.storage.as_strided((blocks, n, layout.scale_units), (block_units, scale_step, 1), scale_offset)
        return data, scales
