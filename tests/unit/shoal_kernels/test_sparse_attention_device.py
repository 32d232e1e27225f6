"""sparse_attention on an accelerator (or in Triton's interpreter): near the host, and each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16, PagedRows, main_format, window_format
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.ops.norm_rope import plain_rope_table
from shoal_kernels.ops.sparse_attention import sparse_attention
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, backends, needs_device
from torch import Tensor
from unit.shoal_kernels.parity import normal, values

_PER_ROW = ("query", "window_index", "positions", "row_seq", "topk")
_ENTRY_ARGUMENTS = ("entries", "block_table", "row_seq", "topk")
_BACKENDS = backends(tilelang=True)
_TABLES = {rope_dim: plain_rope_table(rope_dim, 10000.0, 4096) for rope_dim in (16, 32, 64)}

Problem = dict[str, Any]


def _problem(
    rows: int,
    *,
    heads: int = 4,
    dim: int = 64,
    window: int = 16,
    topk: int = 8,
    per_block: int = 16,
    blocks: int = 6,
    seed: int = 1,
    full: bool = False,
) -> Problem:
    """Rows of two sequences on host tensors; lists of random length with an empty one, or `full` ones."""
    generator = torch.Generator().manual_seed(seed)
    layout = main_format(dim, SERVED)
    storage = torch.zeros(blocks + 1, 16 + per_block * layout.units, dtype=torch.uint8)
    entries = PagedRows(storage, 16, per_block, layout, page_split=False)
    places = torch.arange(blocks * per_block)
    entries.write(places // per_block + 1, places % per_block, normal(blocks * per_block, dim, seed=seed + 1))
    window_index = torch.full((rows, window), -1, dtype=torch.int32)
    chosen = torch.full((rows, topk), -1, dtype=torch.int32)
    for row in range(rows):
        n = window if full else int(torch.randint(0, window + 1, (), generator=generator))
        m = topk if full else int(torch.randint(0, topk + 1, (), generator=generator))
        window_index[row, :n] = torch.arange(n, dtype=torch.int32) + row % 5
        picked = torch.randperm(blocks * per_block, generator=generator)[:m]
        chosen[row, :m] = picked.sort().values.to(torch.int32)
    if rows > 2 and not full:
        window_index[2], chosen[2] = -1, -1
    order = torch.randperm(blocks, generator=generator).to(torch.int32) + 1
    return {
        "query": values(rows, heads, dim, seed=seed) if rows else torch.empty(0, heads, dim),
        "window": window_format(dim, SERVED).encode(normal(window + 8, dim, seed=seed + 2)),
        "window_index": window_index,
        "sink": normal(heads, seed=seed + 3),
        "scale": dim**-0.5,
        "positions": torch.arange(rows) * 3 % 4096,
        "table": _TABLES[64 if dim >= 128 else 16],
        "entries": entries,
        "block_table": torch.stack((order, order.flip(0))),
        "row_seq": (torch.arange(rows) % 2).to(torch.int32),
        "topk": chosen,
    }


def _on_device(problem: Problem) -> Problem:
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in problem.items()}
    moved["query"] = moved["query"].to(torch.bfloat16)
    problem["table"].cover(4095, DEVICE)
    if "entries" in problem:
        held = problem["entries"]
        layout = main_format(held.format.dim, SERVED_BF16)
        moved["entries"] = PagedRows(
            held.storage.to(DEVICE), held.offset, held.entries_per_block, layout, page_split=held.page_split
        )
    return moved


def _run(problem: Problem, backend: str, **more: Any) -> Tensor:
    return sparse_attention(**problem, **more, precision=SERVED_BF16, backend=backend)


def _worst_row(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a row and head; NaN fails every comparison."""
    difference = (got.double().cpu() - want.double()).norm(dim=-1)
    worst = difference / want.double().norm(dim=-1).clamp_min(1e-20)
    return float(torch.where(difference == 0, 0.0, worst).max()) if worst.numel() else 0.0


def _choose(problem: Problem, rows: Tensor) -> Problem:
    return {name: value[rows] if name in _PER_ROW else value for name, value in problem.items()}


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "window", "topk"),
    [(0, 4, 64, 16, 8), (1, 4, 64, 16, 8), (9, 4, 64, 16, 8), (5, 8, 64, 40, 64), (3, 3, 96, 21, 33)],
)
def test_attention_on_the_device_is_near_the_host(
    backend: str, rows: int, heads: int, dim: int, window: int, topk: int
) -> None:
    problem = _problem(rows, heads=heads, dim=dim, window=window, topk=topk)
    want = sparse_attention(**problem, precision=SERVED)
    got = _run(_on_device(problem), backend)
    assert got.shape == want.shape
    assert got.dtype == torch.bfloat16
    assert _worst_row(got, want) < 1e-2


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_row_with_an_empty_list_gives_zeros(backend: str) -> None:
    assert not _run(_on_device(_problem(4)), backend)[2].any()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_attention_over_the_window_alone_is_near_the_host(backend: str) -> None:
    problem = {name: v for name, v in _problem(6, window=21).items() if name not in _ENTRY_ARGUMENTS}
    assert _worst_row(_run(_on_device(problem), backend), sparse_attention(**problem, precision=SERVED)) < 1e-2


@pytest.mark.parametrize("backend", _BACKENDS)
def test_the_cast_output_is_the_cast_of_the_output(backend: str) -> None:
    problem = _on_device(_problem(6))
    plain = _run(problem, backend).cpu()
    want = cast_q8(plain.to(torch.float32), precision=SERVED)
    assert torch.equal(_run(problem, backend, cast_out=True).cpu(), want.to(torch.bfloat16))


def test_the_cast_output_on_the_host_is_the_cast_of_the_output() -> None:
    problem = _problem(4)
    want = cast_q8(sparse_attention(**problem, precision=SERVED), precision=SERVED)
    assert_equal_bits(sparse_attention(**problem, cast_out=True, precision=SERVED), want)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_row_on_the_device_does_not_depend_on_its_batch(backend: str) -> None:
    problem = _on_device(_problem(7))
    assert_rows_independent(lambda rows: _run(_choose(problem, rows), backend), 7, sizes=(1, 2, 3))


@pytest.mark.parametrize("backend", _BACKENDS)
def test_padding_of_the_lists_changes_no_bit_on_the_device(backend: str) -> None:
    problem = _on_device(_problem(5))
    wide = dict(problem)
    for name, extra in (("window_index", 37), ("topk", 70)):
        wide[name] = torch.nn.functional.pad(problem[name], (0, extra), value=-1)
    assert_equal_bits(_run(wide, backend), _run(problem, backend))


@pytest.mark.parametrize("backend", _BACKENDS)
def test_huge_scores_and_a_low_sink_stay_finite(backend: str) -> None:
    problem = _problem(5)
    problem["query"] = problem["query"] * 1e4
    problem["sink"] = torch.full_like(problem["sink"], -1e4)
    got = _run(_on_device(problem), backend)
    assert bool(torch.isfinite(got).all())
    assert _worst_row(got, sparse_attention(**problem, precision=SERVED)) < 1e-2


def test_a_window_of_values_is_refused_where_records_are_kept() -> None:
    problem = _on_device(_problem(2))
    with pytest.raises(ValueError, match="window must be"):
        _run(problem | {"window": torch.zeros(24, 64, dtype=torch.bfloat16, device=DEVICE)}, "triton")


_RELEASED: Problem = {"heads": 64, "dim": 512, "window": 128, "topk": 512, "per_block": 128, "blocks": 8}


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("window", [128, 133])
def test_attention_of_released_size_is_near_the_host(backend: str, full: bool, window: int) -> None:
    problem = _problem(13, **(_RELEASED | {"window": window}), full=full)
    want = sparse_attention(**problem, precision=SERVED)
    moved = _on_device(problem)
    assert _worst_row(_run(moved, backend), want) < 1e-2
    plain = _run(moved, backend).cpu()
    cast = cast_q8(plain.to(torch.float32), precision=SERVED).to(torch.bfloat16)
    assert torch.equal(_run(moved, backend, cast_out=True).cpu(), cast)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_row_of_released_size_does_not_depend_on_its_batch(backend: str) -> None:
    problem = _on_device(_problem(300, **_RELEASED))
    assert_rows_independent(
        lambda rows: _run(_choose(problem, rows), backend), 300, sizes=(1, 2, 3, 4, 5, 6, 48, 131, 133)
    )
