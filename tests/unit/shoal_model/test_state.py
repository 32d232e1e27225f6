"""Window rows as released records: what leaves a slot comes back with the same values."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.precision import SERVED
from shoal_kernels.row_formats import window_format
from shoal_model.rings import StaleRingRead
from shoal_model.state import StateSlots

DIM = 64
FORMAT = window_format(DIM, SERVED)


def make_state() -> StateSlots:
    return StateSlots(
        num_slots=2,
        num_encoder=2,
        num_decoder=1,
        num_draft=0,
        pair_layers=(1,),
        window=8,
        backtrack=6,
        head_dim=DIM,
        window_format=FORMAT,
    )


def cast_values(rows: int) -> torch.Tensor:
    """Dequantised rows whose largest values straddle every boundary of the scale, down to all zeros."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((rows, DIM), generator=generator)
    peaks = torch.linspace(100.0, 900.0, rows) / 448 * 2.0 ** (torch.arange(rows) % 40 - 20)
    values[:, ::32] = peaks[:, None]
    values[: rows // 2] *= peaks[: rows // 2, None]
    values[-1] = 0.0
    return FORMAT.decode(FORMAT.encode(values))


def test_values_survive_the_record_even_where_rounding_fills_the_scale() -> None:
    values = cast_values(400)
    assert torch.equal(FORMAT.decode(FORMAT.encode(values)), values)


def test_of_more_rows_than_a_ring_holds_the_last_are_kept() -> None:
    state, values = make_state(), torch.stack([cast_values(30), cast_values(30).flip(0)])
    state.write_window(1, range(2), 100, FORMAT.encode(values))
    assert torch.equal(FORMAT.decode(state.read_window(1, range(2), 116, 130)), values[:, 16:])
    with pytest.raises(StaleRingRead):
        state.read_window(1, range(2), 115, 130)


def test_records_of_another_shape_are_refused_and_nothing_is_marked() -> None:
    state = make_state()
    with pytest.raises(ValueError, match="window records"):
        state.write_window(0, range(2), 0, torch.zeros((1, 4, FORMAT.units), dtype=torch.uint8))
    assert not state.has_window(0, range(2), 0, 4)


def test_open_pairs_round_trip_and_open_at_even_positions() -> None:
    state, pair = make_state(), torch.randn(1, 2, DIM)
    state.write_open_pair(0, 40, pair)
    assert torch.equal(state.read_open_pair(0, 40), pair)
    with pytest.raises(ValueError, match="even position"):
        state.read_open_pair(0, 41)
    with pytest.raises(StaleRingRead):
        state.read_open_pair(0, 42)
