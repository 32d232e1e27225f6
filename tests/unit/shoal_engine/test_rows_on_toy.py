"""What leaves and enters an engine besides tokens: stored blocks and snapshots, prefix hits, hand-overs."""

from typing import Any

import numpy as np
import pytest
from shoal_engine.errors import (
    BadRows,
    HitNotUsable,
)
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows, RowKind
from shoal_engine.requests import ChoiceStart, PrefillRequest
from support.engine_driver import Driver, request
from support.toy_driver import LENGTHS, driver, prompt_of
from support.toy_model import REPLAY, toy_output, toy_seed


def exported(length: int, output: int = 0, **more: Any) -> Driver:
    """A driver that ran one request with write-back."""
    d = driver(chunk=70, **more)
    d.generate(request(prompt_of(length), max_tokens=output + 1, ignore_eos=True, export_chain=True))
    return d


@pytest.mark.parametrize("length", [100, 152, 280, 300, 400])
@pytest.mark.parametrize("output", [0, 1, 130, 270])
def test_a_normal_end_stores_every_full_block_and_the_snapshot_at_s(length: int, output: int) -> None:
    d = exported(length, output)
    total = length + output  # tokens with KV: all but the last output token
    stored = {}
    for (_, choice, index), data in d.sink.blocks.items():
        assert (choice is None) == (index < length // 128)
        stored[index] = np.frombuffer(data, dtype=np.int64).tolist()
    tokens = [*prompt_of(length), *d.sink.tokens["r", 0]]
    assert stored == {i: tokens[i * 128 : i * 128 + 128] for i in range(total // 128)}
    wanted = {max(0, (n - REPLAY) // 128 * 128) for n in (length, total)} - {0}
    assert {position for _, _, position in d.sink.snapshots} == wanted
    for (_, _, position), rows in d.sink.snapshots.items():
        # The cache keeps no snapshot whose block it does not have.
        assert position // 128 - 1 in d.sink.blocks_at_snapshot[position]
        assert np.frombuffer(rows, dtype=np.int64)[:16].tolist() == tokens[position - 16 : position]


def test_tokens_past_a_finish_reach_no_stored_block() -> None:
    d = driver(quality=100)
    d.submit(request(prompt_of(120), max_tokens=300, ignore_eos=True, export_chain=True))
    d.run(until=lambda: len(d.sink.tokens["r", 0]) >= 20)
    d.core.finish("r", 0, 7)
    assert not d.sink.blocks
    d.submit(request(prompt_of(120), name="s", max_tokens=300, ignore_eos=True, export_chain=True))
    d.run(until=lambda: len(d.sink.tokens["s", 0]) >= 20)
    d.core.finish("s", 0, 8)
    assert [index for _, _, index in d.sink.blocks] == [0]


@pytest.mark.parametrize("has_snapshot", [True, False])
@pytest.mark.parametrize("length", [280, 300, 411])
def test_a_prefix_hit_gives_the_same_answer_with_and_without_its_snapshot(length: int, has_snapshot: bool) -> None:
    first = exported(length)
    hit = (length - REPLAY) // 128 * 128
    blocks = [first.sink.blocks["r", None, i] for i in range(hit // 128)]
    d = driver(chunk=33)
    d.admit(request(prompt_of(length), max_tokens=50, ignore_eos=True, export_chain=True))
    snapshot = first.sink.snapshots["r", None, hit]
    d.core.load_prefix(
        "r", PrefixRows(hit_tokens=hit, blocks=blocks, encoder_window=snapshot if has_snapshot else None)
    )
    d.core.start("r")
    d.run()
    assert d.sink.tokens["r", 0] == toy_output(prompt_of(length), 7, 50, frozenset())
    assert d.sink.ended["r"][1].cached_tokens == hit
    assert all(index >= hit // 128 for _, _, index in d.sink.blocks)
    # A warm replay rebuilds the snapshot and gives it back to the cache.
    assert (("r", None, hit) in d.sink.snapshots) is not has_snapshot
    if not has_snapshot:
        assert d.sink.snapshots["r", None, hit] == snapshot


def test_a_branch_stores_a_snapshot_below_it() -> None:
    d = driver()
    d.admit(request(prompt_of(700), max_tokens=5, export_chain=True))
    first = exported(700)
    blocks = [first.sink.blocks["r", None, i] for i in range(1)]
    d.core.load_prefix("r", PrefixRows(hit_tokens=128, blocks=blocks, encoder_window=None, branch_tokens=390))
    d.core.start("r")
    d.run()
    assert {p for _, _, p in d.sink.snapshots} == {128, 384, 640}


def test_a_cache_point_stores_its_snapshots() -> None:
    d = driver()
    d.generate(request(prompt_of(700), max_tokens=1, export_chain=True, cache_points=(270,)))
    assert {p for _, _, p in d.sink.snapshots} == {128, 256, 640}


def test_an_unusable_hit_is_refused() -> None:
    d = driver()
    d.admit(request(prompt_of(151), max_tokens=5))
    block = bytes(128 * 8)
    with pytest.raises(HitNotUsable):
        d.core.load_prefix("r", PrefixRows(hit_tokens=128, blocks=[block], encoder_window=None))
    with pytest.raises(HitNotUsable):
        d.core.load_prefix("r", PrefixRows(hit_tokens=64, blocks=[], encoder_window=None))
    d.admit(request(prompt_of(152), name="s", max_tokens=5))
    with pytest.raises(BadRows):
        d.core.load_prefix("s", PrefixRows(hit_tokens=128, blocks=[block[:-1]], encoder_window=None))
    with pytest.raises(BadRows):
        d.core.load_prefix("s", PrefixRows(hit_tokens=128, blocks=[], encoder_window=None))


def prefilled(length: int, *, hit: int = 0) -> tuple[list[LogicalRows], bytes]:
    d = driver(chunk=40)
    prompt = np.array(prompt_of(length))
    d.admit(PrefillRequest(request_id="p", prompt_ids=prompt))
    if hit:
        source = exported(length)
        blocks = [source.sink.blocks["r", None, i] for i in range(hit // 128)]
        window = source.sink.snapshots["r", None, hit]
        d.core.load_prefix("p", PrefixRows(hit_tokens=hit, blocks=blocks, encoder_window=window))
    d.core.start("p")
    d.run()
    d.assert_at_baseline()
    hidden, computed = d.sink.prefilled["p"]
    assert computed == length - hit
    assert all(rows.position_begin >= hit for rows in d.sink.rows["p"] if rows.kind is RowKind.BLOCK)
    return d.sink.rows["p"], hidden


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_prefilled_elsewhere_gives_the_same_answer(length: int) -> None:
    rows, hidden = prefilled(length)
    d = driver()
    d.admit(request(prompt_of(length), max_tokens=150, ignore_eos=True, export_chain=True, choices=[ChoiceStart()] * 2))
    half = len(rows) // 2
    d.core.load_rows("r", rows[:half])
    d.core.load_prompt("r", HandoverRows(rows=rows[half:], hidden_row=hidden))
    d.run()
    for choice in range(2):
        assert d.sink.tokens["r", choice] == toy_output(prompt_of(length), toy_seed(7, choice), 150, frozenset())
    assert all(choice is not None for _, choice, _ in d.sink.blocks)
    total, last = length + 149, max(0, (length - REPLAY) // 128 * 128)
    wanted = {max(0, (total - REPLAY) // 128 * 128)} - {0, last}
    assert {position for _, _, position in d.sink.snapshots} == wanted
    d.assert_at_baseline()


def test_rows_below_a_hit_come_from_the_cache_and_the_rest_from_prefill() -> None:
    rows, hidden = prefilled(300, hit=256)
    source = exported(300)
    d = driver()
    d.admit(request(prompt_of(300), max_tokens=40, ignore_eos=True))
    blocks = [source.sink.blocks["r", None, i] for i in range(2)]
    d.core.load_prefix("r", PrefixRows(hit_tokens=256, blocks=blocks, encoder_window=None))
    d.core.load_prompt("r", HandoverRows(rows=rows, hidden_row=hidden))
    d.run()
    assert d.sink.tokens["r", 0] == toy_output(prompt_of(300), 7, 40, frozenset())
    assert d.sink.ended["r"][1].cached_tokens == 256


def test_a_hand_over_without_draft_windows_starts_with_an_empty_one() -> None:
    rows, hidden = prefilled(130)
    d = driver()
    d.admit(request(prompt_of(130), max_tokens=40, ignore_eos=True))
    kept = [part for part in rows if part.kind is not RowKind.DRAFT_WINDOW]
    d.core.load_prompt("r", HandoverRows(rows=kept, hidden_row=hidden))
    d.run()
    assert d.sink.tokens["r", 0] == toy_output(prompt_of(130), 7, 40, frozenset())


@pytest.mark.parametrize("kind", [kind for kind in RowKind if kind is not RowKind.DRAFT_WINDOW])
def test_an_incomplete_hand_over_is_refused_and_the_prompt_can_still_run_here(kind: RowKind) -> None:
    rows, hidden = prefilled(279)
    d = driver()
    d.admit(request(prompt_of(279), max_tokens=40, ignore_eos=True))
    kept = [part for part in rows if part.kind is not kind]
    with pytest.raises(BadRows):
        d.core.load_prompt("r", HandoverRows(rows=kept, hidden_row=hidden))
    d.core.start("r")
    d.run()
    assert d.sink.tokens["r", 0] == toy_output(prompt_of(279), 7, 40, frozenset())


def test_rows_of_a_wrong_size_or_place_are_refused() -> None:
    rows, hidden = prefilled(279)
    d = driver()
    d.admit(request(prompt_of(279), max_tokens=40))
    for part in rows:
        short = LogicalRows(
            kind=part.kind, position_begin=part.position_begin, position_end=part.position_end, shape=part.shape,
            dtype=part.dtype, data=bytes(part.data)[:-1],
        )  # fmt: skip
        with pytest.raises(BadRows):
            d.core.load_rows("r", [short])
    moved = LogicalRows(
        kind=RowKind.BLOCK, position_begin=256, position_end=384, shape=(1024,), dtype="uint8", data=bytes(1024)
    )
    with pytest.raises(BadRows):
        d.core.load_rows("r", [moved])
    with pytest.raises(BadRows):
        d.core.load_prompt("r", HandoverRows(rows=rows, hidden_row=hidden[:-1]))


def test_cancel_after_a_hand_over_and_before_its_first_token_gives_everything_back() -> None:
    rows, hidden = prefilled(130)
    d = driver()
    d.admit(request(prompt_of(130), max_tokens=40))
    d.core.load_prompt("r", HandoverRows(rows=rows, hidden_row=hidden))
    assert d.core.cancel("r")
    d.assert_at_baseline()
    assert not d.core.step()
    assert not d.sink.entries
