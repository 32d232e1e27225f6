"""How one record of the cache is laid out: the window, main and index records, cast or not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from shoal_kernels import formats
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve


class RecordKind(Enum):
    """The three records of the cache. The value is the code that compiled kernels take."""

    WINDOW = 0  # Q8
    MAIN = 1  # Q4nv
    INDEX = 2  # Q4ue


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Layout of one record of `dim` values: `data_units` storage units of data, then `scale_units` of scales.

    Cast: the unit is a byte. Not cast (precision EXACT): the unit is one value of the precision's dtype, no scales.
    """

    kind: RecordKind
    dim: int
    precision: Precision

    def __post_init__(self) -> None:
        if self.precision.cast_cache and (self.dim < 1 or self.dim % 32):
            raise ValueError(f"a cast cache record needs a dimension that is a multiple of 32, got {self.dim}")

    @property
    def is_cast(self) -> bool:
        """Whether records are bytes."""
        return self.precision.cast_cache

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the storage unit."""
        return torch.uint8 if self.is_cast else self.precision.dtype

    @property
    def data_units(self) -> int:
        """Units of data per record."""
        return self.dim if not self.is_cast or self.kind is RecordKind.WINDOW else self.dim // 2

    @property
    def scale_units(self) -> int:
        """Units of scales per record."""
        if not self.is_cast:
            return 0
        return self.dim // (formats.Q4NV_GROUP if self.kind is RecordKind.MAIN else 32)

    @property
    def units(self) -> int:
        """Units per record."""
        return self.data_units + self.scale_units

    def encode(self, values: Tensor) -> Tensor:
        """values [..., dim] in the precision's dtype -> storage [..., units], a new contiguous tensor."""
        if values.shape[-1] != self.dim:
            raise ValueError(f"values must end in {self.dim}, got {list(values.shape)}")
        if not self.is_cast:
            return values.to(self.storage_dtype).contiguous()
        flat = values.reshape(-1, self.dim)
        records: Tensor = resolve("encode_records", flat.device.type, self.precision)(flat, self.kind)
        return records.reshape(*values.shape[:-1], self.units)

    def decode(self, storage: Tensor) -> Tensor:
        """storage [..., units] -> values [..., dim] in the precision's dtype."""
        if storage.shape[-1] != self.units or storage.dtype != self.storage_dtype:
            raise ValueError(f"records must be {self.storage_dtype} [..., {self.units}], got {list(storage.shape)}")
        if not self.is_cast:
            return storage.clone()
        flat = storage.reshape(-1, self.units)
        values: Tensor = resolve("decode_records", flat.device.type, self.precision)(flat, self.kind, self.dim)
        return values.reshape(*storage.shape[:-1], self.dim)


def window_format(dim: int, precision: Precision) -> RowFormat:
    """Window and draft KV, Q8: 512 dims take 512 + 16 = 528 bytes."""
    return RowFormat(RecordKind.WINDOW, dim, precision)


def main_format(dim: int, precision: Precision) -> RowFormat:
    """Compressed KV, Q4nv: 512 dims take 256 + 32 = 288 bytes."""
    return RowFormat(RecordKind.MAIN, dim, precision)


def index_format(dim: int, precision: Precision) -> RowFormat:
    """Index keys, Q4ue: 128 dims take 64 + 4 = 68 bytes."""
    return RowFormat(RecordKind.INDEX, dim, precision)
