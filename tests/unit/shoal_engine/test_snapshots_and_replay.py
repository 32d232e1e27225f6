"""Where snapshots are cut, what is kept, and how much of a hit is usable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.errors import HitNotUsable
from shoal_engine.replay import check_hit, plan_prompt, recovery_decoder_start, usable_hit
from shoal_engine.snapshots import (
    WindowCopies,
    copies_kept,
    prefill_cuts,
    snapshot_position,
    stored_snapshots,
    window_pieces,
)

WINDOW, BACKTRACK, REPLAY = 128, 6, 140
lengths = st.integers(1, 3000)


@given(lengths, st.integers(1, 400))
def test_s_is_the_greatest_multiple_that_leaves_the_replay(length: int, replay: int) -> None:
    position = snapshot_position(length, replay)
    assert position % 128 == 0
    assert position == 0 or position <= length - replay
    assert position + 128 > length - replay


@given(lengths, lengths)
def test_the_snapshot_of_an_end_is_among_the_copies_at_any_frontier(prompt: int, output: int) -> None:
    copies = WindowCopies(copies_kept(REPLAY))
    for cut in prefill_cuts(0, prompt, REPLAY):
        copies.add(cut, b"")
    for frontier in range(prompt + 1, prompt + output + 1):
        if frontier % 128 == 0:
            copies.add(frontier, b"")
    position = snapshot_position(prompt + output, REPLAY)
    assert position == 0 or position in copies.positions()


def test_copies_of_the_greatest_positions_stay() -> None:
    copies = WindowCopies(2)
    for position in (128, 256, 384):
        copies.add(position, bytes([position // 128]))
    assert copies.positions() == (256, 384)
    assert (copies.get(128), copies.get(384)) == (None, b"\x03")
    other = copies.clone()
    other.add(512, b"")
    assert copies.positions() == (256, 384)


@given(lengths, st.lists(lengths, max_size=3), lengths, st.integers(0, 10))
def test_a_prefill_stops_wherever_it_stores_a_snapshot(
    length: int, points: list[int], branch: int, hit_blocks: int
) -> None:
    hit = usable_hit(hit_blocks * 128, length, REPLAY)
    cuts = prefill_cuts(hit, length, REPLAY, points, branch)
    assert list(cuts) == sorted(set(cuts))
    assert all(hit < cut <= length and cut % 128 == 0 for cut in cuts)
    assert {p for p in stored_snapshots(length, REPLAY, points, branch) if p > hit} <= set(cuts)
    assert set(range(max(snapshot_position(length, REPLAY), hit) + 128, length + 1, 128)) <= set(cuts)


@given(lengths)
def test_window_pieces_of_the_released_window_are_one_run_from_s(length: int) -> None:
    pieces = window_pieces(length, REPLAY, WINDOW)
    positions = [p for low, high in pieces for p in range(low, high)]
    first = snapshot_position(length, REPLAY)
    assert positions == list(range(first, length))
    assert len(positions) <= REPLAY + 127


@given(lengths, st.sampled_from([16, 128, 200]))
def test_window_pieces_cover_the_window_of_every_later_multiple_and_of_the_end(length: int, window: int) -> None:
    replay = window + 12
    covered = {p for low, high in window_pieces(length, replay, window) for p in range(low, high)}
    for end in {*range(snapshot_position(length, replay) + 128, length + 1, 128), length}:
        assert set(range(max(0, end - window), end)) <= covered


@given(lengths, lengths)
def test_a_usable_hit_passes_the_check_and_a_longer_one_does_not(cached: int, length: int) -> None:
    hit = usable_hit(cached, length, REPLAY)
    check_hit(hit, length, REPLAY)
    assert hit <= cached
    if hit + 128 <= cached:
        with pytest.raises(HitNotUsable):
            check_hit(hit + 128, length, REPLAY)


def test_warm_replay_starts_e_windows_before_the_hit_and_stores_nothing_below_it() -> None:
    plan = plan_prompt(6000, 5120, False, replay_length=140, encoder_layers=20, window=128)
    assert (plan.run_start, plan.encoder_start, plan.entry_start, plan.decoder_start) == (2560, 2560, 5120, 5860)
    plan = plan_prompt(600, 384, False, replay_length=140, encoder_layers=20, window=128)
    assert (plan.run_start, plan.encoder_start) == (0, 0)
    plan = plan_prompt(6000, 5120, True, replay_length=140, encoder_layers=20, window=128)
    assert (plan.run_start, plan.encoder_start, plan.entry_start) == (5120, 0, 5120)
    plan = plan_prompt(100, 0, True, replay_length=140, encoder_layers=20, window=128)
    assert (plan.run_start, plan.entry_start, plan.decoder_start) == (0, 0, 0)


def test_recovery_reaches_one_window_back_per_decoder_layer() -> None:
    assert recovery_decoder_start(9999, decoder_layers=20, window=128) == 9999 - 20 * 127
    assert recovery_decoder_start(100, decoder_layers=20, window=128) == 0
