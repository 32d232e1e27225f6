"""sparse_attention: compiled bits equal the reference's, and both equal plain attention."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import EXACT, SERVED, PagedRows, Precision, main_format, window_format
from shoal_kernels.ops.norm_rope import plain_rope_table, rope
from shoal_kernels.ops.sparse_attention import sparse_attention
from unit.shoal_kernels.parity import assert_rows_independent, assert_same_bits, normal, values

_DIM, _HEADS, _ENTRIES, _BLOCKS = 64, 3, 16, 6
_TABLE = plain_rope_table(16, 10000.0, 4096)


def _problem(rows: int, precision: Precision, seed: int = 1) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    layout = main_format(_DIM, precision)
    storage = torch.zeros(_BLOCKS + 1, 8 + _ENTRIES * layout.units, dtype=layout.storage_dtype)
    entries = PagedRows(storage, 8, _ENTRIES, layout, page_split=False)
    places = torch.arange(_BLOCKS * _ENTRIES)
    entries.write(
        places // _ENTRIES + 1, places % _ENTRIES, normal(_BLOCKS * _ENTRIES, _DIM, seed=3).to(precision.dtype)
    )
    window_length = torch.randint(0, 17, (rows,), generator=generator)
    chosen = torch.randint(0, 11, (rows,), generator=generator)
    window_index = torch.full((rows, 16), -1, dtype=torch.int32)
    topk = torch.full((rows, 10), -1, dtype=torch.int32)
    for row in range(rows):
        n, m = int(window_length[row]), int(chosen[row])
        window_index[row, :n] = torch.arange(n, dtype=torch.int32) + row % 5
        picked = torch.randperm(_BLOCKS * _ENTRIES, generator=generator)[:m]
        topk[row, :m] = picked.sort().values.to(torch.int32)
    if rows > 2:
        window_index[2], topk[2] = -1, -1
    return {
        "query": values(rows, _HEADS, _DIM, seed=seed).to(precision.dtype),
        "window": window_format(_DIM, precision).decode(
            window_format(_DIM, precision).encode(normal(24, _DIM, seed=4).to(precision.dtype))
        ),
        "window_index": window_index,
        "sink": normal(_HEADS, seed=5),
        "scale": _DIM**-0.5,
        "positions": torch.arange(rows) * 3,
        "table": _TABLE,
        "entries": entries,
        "block_table": torch.tensor([[3, 1, 2, 6, 5, 4], [1, 2, 3, 4, 5, 6]], dtype=torch.int32),
        "row_seq": (torch.arange(rows) % 2).to(torch.int32),
        "topk": topk,
    }


def _run(problem: dict[str, object], precision: Precision, backend: str | None = None) -> torch.Tensor:
    return sparse_attention(**problem, precision=precision, backend=backend)  # type: ignore[arg-type]


_ENTRY_ARGUMENTS = ("entries", "block_table", "row_seq", "topk")


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 40])
@pytest.mark.parametrize("with_entries", [True, False])
def test_attention_has_the_bits_of_the_reference(rows: int, with_entries: bool) -> None:
    problem = _problem(rows, SERVED)
    if not with_entries:
        problem = {name: value for name, value in problem.items() if name not in _ENTRY_ARGUMENTS}
    assert_same_bits(_run(problem, SERVED, "cpu"), _run(problem, SERVED, "reference"))


def test_rows_do_not_depend_on_their_batch() -> None:
    problem = _problem(70, SERVED)
    per_row = ("query", "window_index", "positions", "row_seq", "topk")

    def run(rows: torch.Tensor) -> torch.Tensor:
        return _run({name: v[rows] if name in per_row else v for name, v in problem.items()}, SERVED)  # type: ignore[index]

    assert_rows_independent(run, 70)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_padding_of_the_lists_changes_nothing(backend: str) -> None:
    problem = _problem(9, SERVED)
    wide = dict(problem)
    for name, extra in (("window_index", 20), ("topk", 300)):
        wide[name] = torch.nn.functional.pad(problem[name], (0, extra), value=-1)  # type: ignore[arg-type]
    assert_same_bits(_run(wide, SERVED, backend), _run(problem, SERVED, backend))


def test_window_records_serve_as_well_as_values() -> None:
    problem = _problem(9, SERVED)
    records = window_format(_DIM, SERVED).encode(normal(24, _DIM, seed=4))
    assert_same_bits(_run(problem | {"window": records}, SERVED), _run(problem, SERVED))


def test_float64_attention_is_a_softmax_over_the_list_and_the_sink() -> None:
    problem = _problem(9, EXACT)
    got = _run(problem, EXACT)
    query, entries, topk = problem["query"], problem["entries"], problem["topk"]
    assert isinstance(query, torch.Tensor)
    assert isinstance(entries, PagedRows)
    for row in range(9):
        index = problem["window_index"][row]  # type: ignore[index]
        ids = topk[row][topk[row] >= 0].long()  # type: ignore[index]
        blocks = problem["block_table"][row % 2][ids // _ENTRIES].long()  # type: ignore[index]
        keys = torch.cat((problem["window"][index[index >= 0].long()], entries.read(blocks, ids % _ENTRIES)))  # type: ignore[index]
        logits = torch.cat((query[row] @ keys.t() * _DIM**-0.5, problem["sink"].double()[:, None]), dim=1)  # type: ignore[attr-defined]
        out = logits.softmax(1)[:, :-1] @ keys
        want = rope(out[None], torch.tensor([row * 3]), _TABLE, inverse=True, precision=EXACT)[0]
        torch.testing.assert_close(got[row], want)


def test_indices_outside_the_window_or_the_table_are_refused() -> None:
    problem = _problem(2, SERVED)
    with pytest.raises(ValueError, match=r"window_index must be in \[-1, 24\), got 0 \.\. 99"):
        _run(problem | {"window_index": torch.tensor([[99], [0]], dtype=torch.int32)}, SERVED)
    with pytest.raises(ValueError, match=r"topk must be in \[-1, 96\), got 0 \.\. 96"):
        _run(problem | {"topk": torch.tensor([[96], [0]], dtype=torch.int32)}, SERVED)
    with pytest.raises(ValueError, match="need block_table, row_seq and topk"):
        _run({name: value for name, value in problem.items() if name != "topk"}, SERVED)
