"""State slots: the ring buffers of every running sequence, and their logical rows in and out."""

from __future__ import annotations

import torch
from shoal_kernels.precision import Precision
from shoal_kernels.row_formats import RowFormat, window_format
from torch import Tensor

from shoal_model.rings import Ring


class StateSlots:
    """Rings of `num_slots` sequences: windows of encoder, decoder and draft layers, and open ratio-2 pairs.

    Layers are numbered as in the layer map: encoder, decoder, then draft blocks. Windows hold released records where
    the precision keeps bytes, else dequantised values; what leaves and enters are the records, position-addressed, so
    two sides may differ in ring length and in what they hold. (Exact both ways: dequantised Q8 values encode to a
    record that decodes to the same values.)
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_encoder: int,
        num_decoder: int,
        num_draft: int,
        pair_layers: tuple[int, ...],
        window: int,
        backtrack: int,
        head_dim: int,
        window_format: RowFormat,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be positive, got {num_slots}")
        self.num_slots = num_slots
        self.pair_layers = pair_layers
        self._format = window_format
        self._head_dim = head_dim
        precision = window_format.precision
        self._holds_records = precision.keeps_bytes
        units, dtype = _window_row(head_dim, precision)

        def windows(num_layers: int) -> Ring:
            length = window + backtrack
            return Ring(num_layers, (units,), num_slots=num_slots, length=length, dtype=dtype, device=device)

        self.encoder, self.decoder, self.draft = windows(num_encoder), windows(num_decoder), windows(num_draft)
        self.pairs = Ring(
            len(pair_layers),
            (2, head_dim),
            num_slots=num_slots,
            length=_pair_length(backtrack),
            dtype=precision.wide,
            device=device,
        )
        self._groups = (self.encoder, self.decoder, self.draft)

    @staticmethod
    def slot_bytes(
        *, num_windows: int, num_pairs: int, window: int, backtrack: int, head_dim: int, precision: Precision
    ) -> int:
        """Bytes of the rings of one slot: windows of all layers and draft blocks, and open pairs."""
        units, dtype = _window_row(head_dim, precision)
        pair = 2 * head_dim * precision.wide.itemsize
        return num_windows * (window + backtrack) * units * dtype.itemsize + num_pairs * _pair_length(backtrack) * pair

    @property
    def rings(self) -> tuple[Ring, ...]:
        """All four groups."""
        return (*self._groups, self.pairs)

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one window record."""
        return self._format.units * self._format.storage_dtype.itemsize

    def clear(self, slot: int) -> None:
        """A new sequence starts in this slot: nothing that it held can be read any more."""
        for ring in self.rings:
            ring.tags.clear(slot)

    def copy(self, source: int, target: int) -> None:
        """Another sequence goes on in slot `target` from where the one in `source` stands."""
        for ring in self.rings:
            ring.copy(source, target)

    def reserve(self, num_rows: int) -> None:
        """Make room for a step of `num_rows` rows. (Open pairs of a step are read where they were computed.)"""
        for ring in self._groups:
            ring.reserve(num_rows)

    def read_window(self, slot: int, layers: range, low: int, high: int) -> Tensor:
        """Window records of positions [low, high): [len(layers), high - low, units] in the window format's storage.

        `layers` are whole groups: the encoder's, the decoder's, the drafter's layers, or neighbours of these together.
        Raises StaleRingRead where the ring moved on or never held a position.
        """
        parts = [ring.read(slot, low, high) for ring in self._groups_of(layers)]
        return torch.cat([part if self._holds_records else self._format.encode(part) for part in parts])

    def write_window(self, slot: int, layers: range, low: int, records: Tensor) -> None:
        """Inverse of `read_window`; of more than a ring's length the last positions are kept."""
        rings = self._groups_of(layers)
        expected = (len(layers), records.shape[1], self._format.units)
        if records.shape != expected or records.dtype != self._format.storage_dtype:
            raise ValueError(
                f"window records {expected} of {self._format.storage_dtype} expected, got {tuple(records.shape)} "
                f"of {records.dtype}"
            )
        values = records if self._holds_records else self._format.decode(records)
        first = 0
        for ring in rings:
            ring.write(slot, low, values[first : first + len(ring.layers)])
            first += len(ring.layers)

    def has_window(self, slot: int, layers: range, low: int, high: int) -> bool:
        """True where `read_window` of the same range would succeed."""
        return all(ring.tags.holds(slot, low, high) for ring in self._groups_of(layers))

    def read_open_pair(self, slot: int, position: int) -> Tensor:
        """Raw score and value of the open pair whose first token is at `position`: [pair layers, 2, head_dim]."""
        if position % 2:
            raise ValueError(f"a pair opens at an even position, not at {position}")
        return self.pairs.read(slot, position, position + 1)[:, 0]

    def write_open_pair(self, slot: int, position: int, values: Tensor) -> None:
        """Inverse of `read_open_pair`."""
        expected = (len(self.pair_layers), 2, self._head_dim)
        if values.shape != expected:
            raise ValueError(f"open pairs {expected} expected, got {tuple(values.shape)}")
        self.pairs.write(slot, position, values[:, None])

    def _groups_of(self, layers: range) -> list[Ring]:
        start, chosen = 0, []
        for ring in self._groups:
            stop = start + len(ring.layers)
            if len(ring.layers) and layers.start <= start and stop <= layers.stop:
                chosen.append(ring)
            start = stop
        if layers.step != 1 or not chosen or sum(len(ring.layers) for ring in chosen) != len(layers):
            raise ValueError(f"{layers} is not made of the encoder's, the decoder's and the drafter's layers")
        return chosen


def _window_row(head_dim: int, precision: Precision) -> tuple[int, torch.dtype]:
    """Units and dtype of a window row in the rings: what `window_rows` makes."""
    if not precision.keeps_bytes:
        return head_dim, precision.dtype
    record = window_format(head_dim, precision)
    return record.units, record.storage_dtype


def _pair_length(backtrack: int) -> int:
    return 2 + max(0, backtrack - 1)
