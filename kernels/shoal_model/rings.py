"""Position-addressed ring buffers of a sequence: window KV of a group of layers, open compressor pairs.

Position p of a slot lies at ring place p mod length. Every place remembers which position it holds, so a stale read is
an error at once and never a silently different answer. Source: v41-flash.md sections 8.2 and 8.5.

A ring buffer is followed in memory by scratch rows for the rows of the running batch: attention then reads "ring rows
below the chunk, then the chunk itself" through one index, without a gather, and a chunk may be longer than the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

_EMPTY = np.int64(-1)


class StaleRingRead(RuntimeError):
    """A ring place does not hold the position that a row needs: a bug of the caller, or of this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWrite:
    """Which batch rows enter the rings after a layer, and where: the last rows of every segment."""

    sources: Tensor  # int64 [n], rows of the batch
    targets: Tensor  # int64 [n], flat ring places


class PositionTags:
    """The position that every ring place of a group holds.

    Invariant: tags[slot, p % length] is p, or another position of the same residue, or -1.
    """

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots = num_slots
        self.length = length
        self._tags = np.full((num_slots, length), _EMPTY, dtype=np.int64)

    def clear(self, slot: int) -> None:
        """Forget everything a slot holds (a new sequence starts in it)."""
        self._tags[slot] = _EMPTY

    def copy(self, source: int, target: int) -> None:
        """Slot `target` holds what slot `source` holds."""
        self._tags[target] = self._tags[source]

    def places(self, slots: Ints, positions: Ints) -> Ints:
        """Flat places of (slot, position) pairs, which broadcast."""
        return slots * self.length + positions % self.length

    def runs(self, slots: Ints, low: Ints, count: int) -> Ints:
        """Places of positions low .. low + count - 1 of each slot, [len(slots), count]."""
        if count > self.length:
            return self.places(slots[:, None], low[:, None] + np.arange(count))
        # One division a row: a run passes the end of its ring at most once.
        places = (low % self.length)[:, None] + np.arange(count)
        places -= self.length * (places >= self.length)
        return places + (slots * self.length)[:, None]

    def check(self, places: Ints, positions: Ints) -> None:
        """Raise StaleRingRead unless every place holds its position."""
        held = self._tags.reshape(-1)[places]
        if not np.array_equal(held, positions):
            wrong = int(np.flatnonzero(held != positions)[0])
            raise StaleRingRead(
                f"slot {int(places[wrong]) // self.length}: position {int(positions[wrong])} wanted, "
                f"its place holds {int(held[wrong])}"
            )

    def mark(self, places: Ints, positions: Ints) -> None:
        """Note that these places now hold these positions."""
        self._tags.reshape(-1)[places] = positions

    def holds(self, slot: int, low: int, high: int) -> bool:
        """True where every position of [low, high) is in the slot's ring."""
        positions = np.arange(low, high)
        return bool(np.array_equal(self._tags[slot, positions % self.length], positions))


class Ring:
    """Ring buffers of one group of layers that are always written together, with scratch rows behind them.

    `layers[i]` is [num_slots * length + scratch, *row shape]; rows are already cast (window KV is Q8: dequantised
    values or released records).
    """

    def __init__(
        self,
        num_layers: int,
        row_shape: tuple[int, ...],
        *,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tags = PositionTags(num_slots, length)
        self.length = length
        self.scratch_start = num_slots * length
        self.row_shape = row_shape
        self._device = torch.device(device)
        self.layers = [
            torch.zeros((self.scratch_start, *row_shape), dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self._scratch_rows = 0

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` scratch rows; grows in powers of two, so that a larger batch moves memory rarely."""
        if num_rows <= self._scratch_rows or not self.layers:
            return
        self._scratch_rows = 1 << (num_rows - 1).bit_length()
        for i, buffer in enumerate(self.layers):
            grown = buffer.new_zeros((self.scratch_start + self._scratch_rows, *self.row_shape))
            grown[: self.scratch_start] = buffer[: self.scratch_start]
            self.layers[i] = grown

    def scratch(self, layer: int, num_rows: int) -> Tensor:
        """Where the batch's rows of one layer go, [num_rows, *row shape]: attention reads them in `layers[layer]`.

        After the layer's last reader, those that later steps need are copied to their ring places.
        """
        return self.layers[layer][self.scratch_start : self.scratch_start + num_rows]

    def places(self, layer: int) -> Tensor:
        """The ring places of one layer, without scratch: valid as long as nothing is reserved."""
        return self.layers[layer][: self.scratch_start]

    def plan_write(self, slots: Ints, positions: Ints, last: Ints, rows: Ints) -> RingWrite:
        """Write plan for batch rows (per row: slot, position, last position of its segment, row number); marks tags."""
        kept = positions > last - self.length
        places = self.tags.places(slots[kept], positions[kept])
        self.tags.mark(places, positions[kept])
        return RingWrite(sources=torch.from_numpy(rows[kept]), targets=torch.from_numpy(places))

    def plan_window(
        self, slots: Ints, positions: Ints, first: Ints, lowest: Ints, rows: Ints, window: int, block_length: int = 0
    ) -> Tensor:
        """Key index of every row over [rings | scratch], in position order, -1 padded at the end.

        Row i (scratch row rows[i]) sees positions max(positions[i] - window + 1, lowest[i]) .. positions[i]; the ones
        from first[i] on are scratch rows of its own segment, the older ones ring places, which are checked.
        With `block_length`, segments are draft blocks of that length beginning at first[i]: every row of a block sees
        the window that ends before the block, then the whole block.
        returns  int32 [rows, window + block_length]
        raises   StaleRingRead
        """
        start, last_key = positions - window + 1, positions
        if block_length:
            start, last_key = first - window, first + block_length - 1
        low = np.maximum(start, lowest)
        keys = low[:, None] + np.arange(window + block_length)
        in_ring = keys < first[:, None]
        places = self.tags.runs(slots, low, window + block_length)
        self.tags.check(places[in_ring], keys[in_ring])
        first_scratch = self.scratch_start + rows - (positions - first)
        index = np.where(in_ring, places, (first_scratch - first)[:, None] + keys)
        index[keys > last_key[:, None]] = -1
        return torch.from_numpy(index.astype(np.int32))

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` hold what slot `source` holds."""
        taken, given = slice(source * self.length, (source + 1) * self.length), target * self.length
        for buffer in self.layers:
            buffer[given : given + self.length] = buffer[taken]
        self.tags.copy(source, target)

    def read(self, slot: int, low: int, high: int) -> Tensor:
        """Values of positions [low, high) of one slot: [layers, high - low, *row shape]. Raises StaleRingRead."""
        positions = np.arange(low, high)
        places = self.tags.places(np.full_like(positions, slot), positions)
        self.tags.check(places, positions)
        index = torch.from_numpy(places).to(self._device)
        return torch.stack([buffer.index_select(0, index) for buffer in self.layers])

    def write(self, slot: int, low: int, values: Tensor) -> None:
        """Inverse of `read`: values [layers, n, *row shape] of positions from `low`; the last `length` are kept."""
        high = low + values.shape[1]
        positions = np.arange(max(low, high - self.length), high)
        places = self.tags.places(np.full_like(positions, slot), positions)
        index, values = torch.from_numpy(places).to(self._device), values.to(self._device)
        for buffer, rows in zip(self.layers, values, strict=True):
            buffer[index] = rows[values.shape[1] - len(positions) :].to(buffer.dtype)
        self.tags.mark(places, positions)
