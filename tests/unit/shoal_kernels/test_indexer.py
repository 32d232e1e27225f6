"""Indexer: compiled scores and choices equal the reference's, and an exhaustive search."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import EXACT, KV, SERVED, PagedRows, Precision, index_format
from shoal_kernels.ops import indexer
from shoal_kernels.ops.cast import cast_q4ue
from unit.shoal_kernels.parity import assert_rows_independent, assert_same_bits, normal, values

_ENTRIES, _BLOCKS, _DIM, _HEADS = 16, 12, 64, 3


def _cache(precision: Precision, *, page_split: bool = True) -> PagedRows:
    layout = index_format(_DIM, precision)
    storage = torch.zeros(_BLOCKS + 1, 40 + _ENTRIES * layout.units, dtype=layout.storage_dtype)
    rows = PagedRows(storage, 40, _ENTRIES, layout, page_split)
    places = torch.arange(_BLOCKS * _ENTRIES)
    keys = values(_BLOCKS * _ENTRIES, _DIM, seed=1).to(precision.dtype)
    keys[20:40] = keys[0]
    rows.write(places // _ENTRIES + 1, places % _ENTRIES, keys)
    return rows


def _rows(count: int, precision: Precision) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    query = cast_q4ue(values(count, _HEADS, _DIM, seed=count).to(precision.dtype), precision=precision)
    weights = normal(count, _HEADS, seed=count).bfloat16().to(precision.dtype)
    table = torch.stack([torch.randperm(_BLOCKS, generator=generator) + 1 for _ in range(3)]).to(torch.int32)
    row_seq = (torch.arange(count) * 3 // max(count, 1)).to(torch.int32)
    n_vis = torch.randint(0, _BLOCKS * _ENTRIES + 1, (count,), generator=generator)
    return query, weights, table, row_seq, n_vis


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16, 70])
@pytest.mark.parametrize("page_split", [True, False])
def test_scores_have_the_bits_of_the_reference(count: int, page_split: bool) -> None:
    cache, (query, weights, table, row_seq, n_vis) = _cache(SERVED, page_split=page_split), _rows(count, SERVED)
    got, want = (
        indexer.scores(query, weights, cache, table, row_seq, n_vis, precision=SERVED, backend=name)
        for name in ("cpu", "reference")
    )
    assert_same_bits(got, want + 0.0)


@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize("k", [1, 8, 64, 500])
def test_choices_equal_those_of_the_reference(count: int, k: int) -> None:
    cache, (query, weights, table, row_seq, n_vis) = _cache(SERVED), _rows(count, SERVED)
    arguments = query, weights, cache, table, row_seq, n_vis
    (entries, blocks), want = (
        indexer.select_with_candidates(*arguments, k, 5, 8, precision=SERVED, backend=name)
        for name in ("cpu", "reference")
    )
    assert_same_bits((entries, blocks), want)
    inside = [
        indexer.select(*arguments, k, candidates=blocks, candidate_block_size=8, precision=SERVED, backend=name)
        for name in ("cpu", "reference")
    ]
    assert_same_bits(inside[0], inside[1])


@pytest.mark.parametrize("precision", [EXACT, KV, SERVED], ids=lambda p: p.name)
def test_the_choice_is_the_best_by_score_then_lower_id(precision: Precision) -> None:
    cache, (query, weights, table, row_seq, n_vis) = _cache(precision), _rows(20, precision)
    arguments = query, weights, cache, table, row_seq, n_vis
    scores = indexer.scores(*arguments, precision=precision)
    entries, blocks = indexer.select_with_candidates(*arguments, 10, 4, 8, precision=precision)
    for row in range(20):
        visible = int(n_vis[row])
        ranked = sorted(range(visible), key=lambda g, row=row: (-float(scores[row, g]), g))  # type: ignore[misc]
        assert [g for g in entries[row].tolist() if g >= 0] == sorted(ranked[:10])
        best = [float(scores[row, b : min(b + 8, visible)].max()) for b in range(0, visible, 8)]
        best[-1:] = [float("inf")] * len(best[-1:])
        ranked = sorted(range(len(best)), key=lambda b, best=best: (-best[b], b))  # type: ignore[misc]
        assert [b for b in blocks[row].tolist() if b >= 0] == sorted(ranked[:4])


def test_all_visible_entries_are_chosen_when_few() -> None:
    cache, (query, weights, table, row_seq, _) = _cache(SERVED), _rows(3, SERVED)
    n_vis = torch.tensor([0, 3, 5])
    got = indexer.select(query, weights, cache, table, row_seq, n_vis, 5, precision=SERVED)
    assert got.tolist() == [[-1] * 5, [0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]


def test_rows_do_not_depend_on_their_batch() -> None:
    cache, (query, weights, table, row_seq, n_vis) = _cache(SERVED), _rows(70, SERVED)

    def both(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return indexer.select_with_candidates(
            query[rows], weights[rows], cache, table, row_seq[rows], n_vis[rows], 12, 4, 8, precision=SERVED
        )

    assert_rows_independent(both, 70)


def test_a_short_block_table_is_refused() -> None:
    cache, (query, weights, table, row_seq, _) = _cache(SERVED), _rows(1, SERVED)
    with pytest.raises(ValueError, match="n_vis 17 exceeds the block table of 1 blocks"):
        indexer.select(query, weights, cache, table[:, :1], row_seq, torch.tensor([17]), 4, precision=SERVED)
