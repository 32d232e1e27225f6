"""Step plans against a naive simulation: what each row sees is looked up value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_kernels.ops.records import copy_rows
from shoal_kernels.precision import EXACT
from shoal_kernels.row_formats import window_format
from shoal_model.rings import Ring, RingWrite, StaleRingRead
from shoal_model.rows import RowBatch, Segment, StepLimits, StepPlan, plan_step
from shoal_model.state import StateSlots

WINDOW, BACKTRACK = 16, 6
LIMITS = StepLimits(num_blocks=25, vocab_size=100_000, max_positions=1_100)


def make_state(num_slots: int = 3) -> StateSlots:
    return StateSlots(
        num_slots=num_slots,
        num_encoder=1,
        num_decoder=1,
        num_draft=1,
        pair_layers=(2,),
        window=WINDOW,
        backtrack=BACKTRACK,
        head_dim=1,
        window_format=window_format(1, EXACT),
    )


def code(slot: int, position: int) -> float:
    return slot * 10_000 + position


def segment(slot: int, start: int, length: int, **fields: object) -> Segment:
    table = list(range(1 + slot * 8, 9 + slot * 8))
    defaults: dict[str, object] = {
        "slot": slot,
        "block_table": table,
        "start": start,
        "token_ids": [code(slot, p) for p in range(start, start + length)],
        "lookback": [code(slot, p) if p >= 0 else 2 for p in range(start - 3, start)],
    }
    return Segment(**{**defaults, **fields})  # type: ignore[arg-type]


def plan(state: StateSlots, *segments: Segment) -> StepPlan:
    batch = RowBatch(segments=segments)
    state.reserve(sum(len(s.token_ids) for s in segments))
    return plan_step(batch, state, window=WINDOW, ratios=(1, 2), limits=LIMITS)


def seen(ring: Ring, values: torch.Tensor, index: torch.Tensor) -> list[list[float]]:
    ring.scratch(0, values.shape[0]).copy_(values)
    return [[float(ring.layers[0][i, 0]) for i in row if i >= 0] for row in index.tolist()]


def commit(buffer: torch.Tensor, values: torch.Tensor, write: RingWrite) -> None:
    copy_rows(buffer, write.targets, values, write.sources, precision=EXACT)


def run(state: StateSlots, *segments: Segment) -> tuple[list[list[float]], list[list[float]], StepPlan]:
    """What every encoder and decoder row sees, after which the step's rows are in the rings."""
    step = plan(state, *segments)
    codes = step.token_ids[:, None].to(torch.float64)
    encoder = seen(state.encoder, codes, step.encoder.window_index)
    commit(state.encoder.layers[0], codes, step.encoder.window_write)
    decoder: list[list[float]] = []
    if step.decoder is not None:
        kept = codes if step.decoder_rows is None else codes[step.decoder_rows]
        decoder = seen(state.decoder, kept, step.decoder.window_index)
        commit(state.decoder.layers[0], kept, step.decoder.window_write)
    pairs = codes[:, None].expand(-1, 2, -1).contiguous()
    buffer = torch.cat([state.pairs.places(0), pairs])
    for ratio, entry in step.entries.items():
        members = codes[entry.members] if ratio == 1 else buffer[entry.members][:, :, 0]
        slots = (members[0, :, 0] // 10_000).to(torch.int64)
        for j in range(ratio):
            assert torch.equal(members[j, :, 0] % 5_000, (entry.positions + j).to(torch.float64))
        assert torch.equal(entry.blocks, 1 + slots * 8 + entry.positions // 128)
        assert torch.equal(entry.entries, entry.positions % 128 // ratio)
    commit(state.pairs.places(0), pairs, step.pair_write)
    return encoder, decoder, step


def window_of(slot: int, position: int, lowest: int = 0) -> list[float]:
    return [code(slot, p) for p in range(max(position - WINDOW + 1, lowest), position + 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(0, 3))
def test_every_row_sees_its_own_window_however_sequences_are_cut_and_mixed(chunks: list[list[int]], order: int) -> None:
    state, starts = make_state(), [0, 0, 0]
    for turn in range(max(map(len, chunks))):
        active = [(slot, cuts[turn]) for slot, cuts in enumerate(chunks) if turn < len(cuts)]
        active = active[order % len(active) :] + active[: order % len(active)]
        encoder, decoder, step = run(state, *(segment(slot, starts[slot], n) for slot, n in active))
        expected = [window_of(slot, p) for slot, n in active for p in range(starts[slot], starts[slot] + n)]
        assert encoder == expected
        assert decoder == expected
        closing = [p - 1 for slot, n in active for p in range(starts[slot], starts[slot] + n) if p % 2]
        assert step.entries[2].positions.tolist() == closing
        for slot, n in active:
            starts[slot] += n


def test_history_runs_through_the_lookback_and_the_rows() -> None:
    step = plan(make_state(), segment(1, 0, 2), segment(0, 0, 1, lookback=[7, 8, 9], token_ids=[4]))
    assert step.history.tolist() == [[10_000, 2, 2, 2], [10_001, 10_000, 2, 2], [4, 9, 8, 7]]


def test_rejected_rows_are_overwritten_by_position() -> None:
    state = make_state()
    run(state, segment(0, 0, 40))
    run(state, segment(0, 40, 6, token_ids=[code(0, 40), *(5_000 + code(0, p) for p in range(41, 46))]))
    encoder, decoder, _ = run(state, segment(0, 41, 6))
    assert encoder == [window_of(0, p) for p in range(41, 47)]
    assert decoder == encoder


def test_decoder_rows_begin_at_the_replay_and_see_no_older_window() -> None:
    state = make_state()
    encoder, decoder, step = run(state, segment(0, 0, 40, decoder_start=30, decoder_window_start=30, outputs=(39,)))
    assert encoder[35] == window_of(0, 35)
    assert decoder == [window_of(0, p, lowest=30) for p in range(30, 40)]
    assert step.output_rows.tolist() == [9]
    assert step.decoder is not None
    assert step.decoder.num_visible[2].tolist() == [(p + 1) // 2 for p in range(30, 40)]


def test_a_step_without_decoder_rows_has_no_decoder_plan() -> None:
    _, _, step = run(make_state(), segment(0, 0, 4, decoder_start=None))
    assert step.decoder is None
    assert step.output_rows.tolist() == []


def test_a_warm_replay_hides_older_window_keys_and_stores_no_older_entries() -> None:
    encoder, _, step = run(
        make_state(), segment(0, 130, 20, encoder_start=130, entry_start=140, decoder_window_start=130)
    )
    assert encoder == [window_of(0, p, lowest=130) for p in range(130, 150)]
    assert step.entries[1].positions.tolist() == list(range(140, 150))
    assert step.entries[2].positions.tolist() == [140, 142, 144, 146, 148]


def test_a_missing_ring_position_is_an_error_and_not_a_wrong_answer() -> None:
    state = make_state()
    run(state, segment(0, 0, 10))
    with pytest.raises(StaleRingRead, match="position 10 wanted"):
        plan(state, segment(0, 11, 1))


def test_a_cleared_slot_holds_nothing() -> None:
    state = make_state()
    run(state, segment(0, 0, 10))
    state.clear(0)
    with pytest.raises(StaleRingRead):
        plan(state, segment(0, 10, 1))


def test_going_back_further_than_the_backtrack_is_an_error() -> None:
    state = make_state()
    run(state, segment(0, 0, 60))
    plan(state, segment(0, 60 - BACKTRACK, 1))
    with pytest.raises(StaleRingRead):
        plan(state, segment(0, 60 - BACKTRACK - 2, 1))


def test_draft_rows_see_the_window_before_the_block_and_the_whole_block() -> None:
    state = make_state()
    _, _, step = run(state, segment(1, 0, 40))
    codes = step.token_ids[:, None].to(torch.float64)
    write = step.encoder.window_write
    state.draft.layers[0].index_copy_(0, write.targets, codes[write.sources])
    numbers = np.arange(10)
    index = state.draft.plan_window(
        np.full(10, 1), 40 + numbers % 5, np.full(10, 40), np.repeat([0, 30], 5), numbers, WINDOW, block_length=5
    )
    block = torch.arange(900, 910, dtype=torch.float64)[:, None]
    keys = seen(state.draft, block, index)
    for row in range(5):
        assert keys[row] == [*window_of(1, 39), 900, 901, 902, 903, 904]
    for row in range(5, 10):
        assert keys[row] == [*[code(1, p) for p in range(30, 40)], 905, 906, 907, 908, 909]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slot": 3}, "slot 3"),
        ({"token_ids": []}, "0 rows"),
        ({"lookback": [1]}, "three token ids"),
        ({"start": 1020, "token_ids": [1] * 5}, "do not cover position 1024"),
        ({"start": 1098}, "of 1100 positions"),
        ({"token_ids": [5, 100_000]}, "token id"),
        ({"lookback": [-1, 0, 0]}, "token id"),
        ({"block_table": [0, 1]}, "block id"),
        ({"block_table": [25]}, "block id"),
        ({"outputs": (2, 1)}, "ascending"),
        ({"outputs": (4,)}, "ascending"),
        ({"decoder_start": None, "outputs": (1,)}, "ascending"),
    ],
)
def test_malformed_segments_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(make_state(), segment(**{"slot": 0, "start": 0, "length": 4, **fields}))  # type: ignore[arg-type]


def test_a_slot_comes_once_in_a_batch() -> None:
    with pytest.raises(ValueError, match="one segment of a slot"):
        plan(make_state(), segment(0, 0, 4), segment(0, 4, 4))


def test_windows_travel_between_slots_as_records() -> None:
    state = make_state()
    run(state, segment(0, 0, 40))
    records = state.read_window(0, range(0, 2), 24, 40)
    state.write_window(2, range(0, 2), 24, records)
    assert state.has_window(2, range(0, 1), 24, 40)
    assert torch.equal(state.read_window(2, range(1, 2), 24, 40), records[1:])
    with pytest.raises(StaleRingRead):
        state.read_window(0, range(0, 2), 17, 40)
    with pytest.raises(ValueError, match="not made of"):
        state.read_window(0, range(0, 4), 24, 40)


def test_block_ids_beyond_the_rows_are_not_looked_at() -> None:
    step = plan(make_state(), segment(0, 0, 4, block_table=[3, 0, 999]))
    assert step.block_table.tolist() == [[3]]
