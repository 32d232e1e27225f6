"""Indexer on an accelerator: scores close to the host's, choices exact on them, a row's bits its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16, PagedRows
from shoal_kernels.ops import indexer
from support.index_rows import IndexRows, index_rows
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, backends, needs_device
from torch import Tensor

_NANO: dict[str, Any] = {"heads": 4, "dim": 64, "entries": 64, "blocks": 5}
_ODD: dict[str, Any] = {"heads": 3, "dim": 64, "entries": 16, "blocks": 9}
_RELEASED: dict[str, Any] = {"heads": 32, "dim": 128, "entries": 128, "blocks": 80}
_SEQUENCES = [0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 1]


def _assert_close_to_host(rows: IndexRows, backend: str) -> None:
    got = indexer.scores(*rows.all, precision=SERVED_BF16, backend=backend).float().cpu()
    arguments = rows.on_host()
    query, weights = arguments[:2]
    want = indexer.scores(*arguments, precision=SERVED)
    # What the weighted heads sum to without signs: the error is a share of that, not of a sum that may cancel.
    scale = indexer.scores(query, weights.abs(), *arguments[2:], precision=SERVED)
    largest = _largest_products(*arguments)[:, : want.shape[1]]
    shared = got[:, : want.shape[1]]
    visible = torch.arange(got.shape[1])[None] < arguments[5][:, None]
    assert torch.equal(torch.isfinite(got), visible)
    assert bool((got[~visible] == -torch.inf).all())
    seen = visible[:, : want.shape[1]]
    assert bool(((shared - want).abs() <= scale * 2.0**-7 + largest * 2.0**-9)[seen].all())


def _largest_products(
    query: Tensor, weights: Tensor, keys: PagedRows, table: Tensor, row_seq: Tensor, n_vis: Tensor
) -> Tensor:
    """[R, entries]: sum over heads of |w| times the largest magnitudes of query and key."""
    ids = torch.arange(table.shape[1] * keys.entries_per_block)
    blocks = table.long()[:, ids // keys.entries_per_block].clamp_min(0)
    largest = torch.stack([keys.read(row, ids % keys.entries_per_block).abs().amax(-1) for row in blocks])
    return (weights.abs() * query.abs().amax(-1)).sum(1)[:, None] * largest[row_seq.long()]


def _choices(rows: IndexRows, k: int, num_blocks: int, size: int, backend: str) -> tuple[Tensor, ...]:
    entries, blocks = indexer.select_with_candidates(
        *rows.all, k, num_blocks, size, precision=SERVED_BF16, backend=backend
    )
    inside = indexer.select(
        *rows.all, k, candidates=blocks, candidate_block_size=size, precision=SERVED_BF16, backend=backend
    )
    return entries, blocks, inside


def _assert_exact(rows: IndexRows, k: int, num_blocks: int, size: int, backend: str) -> None:
    entries, blocks, inside = (choice.cpu() for choice in _choices(rows, k, num_blocks, size, backend))
    scores, n_vis = indexer.scores(*rows.all, precision=SERVED_BF16, backend=backend).cpu(), rows.n_vis.cpu()
    assert_equal_bits(entries, indexer.top_entries(scores, n_vis, k))
    assert_equal_bits(blocks, indexer.top_blocks(scores, n_vis, num_blocks, size))
    assert_equal_bits(inside, indexer.top_entries(scores, n_vis, k, candidates=blocks, block_size=size))


@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize("shape", [_NANO, _ODD], ids=["nano", "odd"])
def test_scores_are_close_to_the_host(backend: str, shape: dict[str, Any]) -> None:
    most = shape["entries"] * shape["blocks"]
    n_vis = [0, 1, 63, 64, 65, most, most - 1, 17, 16, 100, 2]
    _assert_close_to_host(index_rows(_SEQUENCES, n_vis, **shape, seed=1, page_split=shape is _NANO), backend)


@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize(
    ("k", "num_blocks", "size", "ties"),
    [
        pytest.param(1, 1, 8, True, marks=pytest.mark.long),
        (64, 9, 8, False),
        pytest.param(500, 100, 8, True, marks=pytest.mark.long),
        (20, 3, 6, True),
    ],
)
def test_choices_are_exact_on_the_scores(backend: str, k: int, num_blocks: int, size: int, ties: bool) -> None:
    n_vis = [0, 1, 63, 64, 65, 320, 319, 17, 16, 100, 2]
    rows = index_rows(_SEQUENCES, n_vis, **_NANO, seed=2, coarse_values=ties)
    _assert_exact(rows, k, num_blocks, size, backend)


@pytest.mark.parametrize("backend", backends(tilelang=True))
def test_rows_do_not_depend_on_their_batch(backend: str) -> None:
    rows = index_rows([0] * 7 + [1], [150, 3, 64, 0, 100, 101, 102, 5], **_NANO, seed=3)

    def operation(chosen: Tensor) -> tuple[Tensor, ...]:
        part = IndexRows(*rows.rows(chosen))
        return (indexer.scores(*part.all, precision=SERVED_BF16, backend=backend), *_choices(part, 20, 6, 8, backend))

    assert_rows_independent(operation, 8, sizes=(3,))


@pytest.mark.parametrize("backend", backends(tilelang=True))
def test_no_rows_and_no_blocks_give_nothing(backend: str) -> None:
    none = index_rows([], [], **_NANO, seed=4)
    entries, blocks, inside = _choices(none, 4, 2, 8, backend)
    assert (entries.shape, blocks.shape, inside.shape) == ((0, 4), (0, 2), (0, 4))
    rows = index_rows([0, 0], [0, 0], **_NANO, seed=4)
    rows = IndexRows(rows.query, rows.weights, rows.keys, rows.table[:, :0].contiguous(), rows.row_seq, rows.n_vis)
    entries, blocks, inside = _choices(rows, 4, 2, 8, backend)
    assert bool((torch.cat((entries, blocks, inside), 1) == -1).all())


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize(("page_split", "uneven"), [(True, False), (True, True), (False, False)])
def test_scores_of_released_size_are_close_to_the_host(backend: str, page_split: bool, uneven: bool) -> None:
    row_seq = [s for s in range(4) for _ in range(6)] + [1] * 14 + [0]
    generator = torch.Generator().manual_seed(5)
    n_vis = torch.randint(0, 20 * 128 + 1, (len(row_seq),), generator=generator).tolist()
    rows = index_rows(row_seq, n_vis, **{**_RELEASED, "blocks": 20}, seed=5, page_split=page_split, uneven=uneven)
    _assert_close_to_host(rows, backend)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize("coarse_values", [False, True], ids=["spread", "ties"])
@pytest.mark.parametrize("blocks", [80, 1100])
def test_choices_of_released_size_are_exact_on_the_scores(backend: str, coarse_values: bool, blocks: int) -> None:
    most = blocks * 128
    row_seq = [0] * 6 + [1] * 5 + [0]
    n_vis = [most - i for i in range(6)] + [511, 512, 513, 0, most // 2] + [4 * 512 + 3]
    rows = index_rows(row_seq, n_vis, **{**_RELEASED, "blocks": blocks}, seed=6, coarse_values=coarse_values)
    _assert_exact(rows, 512, 2048 if blocks > 1000 else 256, 8, backend)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", backends(tilelang=True))
def test_rows_of_released_size_do_not_depend_on_their_batch(backend: str) -> None:
    generator = torch.Generator().manual_seed(7)
    row_seq = [0] * 20 + [1] * 3 + [2] * 7
    n_vis = torch.randint(0, 80 * 128 + 1, (30,), generator=generator).tolist()
    rows = index_rows(row_seq, n_vis, **_RELEASED, seed=7)

    def operation(chosen: Tensor) -> tuple[Tensor, ...]:
        part = IndexRows(*rows.rows(chosen))
        return (indexer.scores(*part.all, precision=SERVED_BF16, backend=backend), *_choices(part, 512, 64, 8, backend))

    assert_rows_independent(operation, 30)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", backends(tilelang=True))
def test_a_call_can_be_captured_in_a_graph(backend: str) -> None:
    rows = index_rows([0] * 6, [9000, 9001, 9002, 9003, 9004, 9005], **_RELEASED, seed=8)
    want = indexer.select(*rows.all, 512, precision=SERVED_BF16, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = indexer.select(*rows.all, 512, precision=SERVED_BF16, backend=backend)
    got.fill_(-7)
    graph.replay()
    assert_equal_bits(got, want)
    assert got.device.type == DEVICE
