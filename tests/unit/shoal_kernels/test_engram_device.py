"""Engram on a device: gathered rows, fetched ahead or not, and the gate, against the host."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.engram import EngramTable, gate, gate_weight, gather, prefetch, take
from support.on_device import (
    DEVICE,
    HAS_DEVICE,
    assert_equal_bits,
    assert_rows_independent,
    needs_device,
    relative_error,
)
from torch import Tensor
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import normal, values


def _table(rows: int, head_dim: int) -> EngramTable:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (rows, head_dim), generator=generator, dtype=torch.uint8)
    data = torch.where(data & 127 == 127, 0, data)
    lowest = 0 if HAS_DEVICE else 20  # the interpreter converts subnormals wrongly
    scales = torch.randint(lowest, 140, (rows, head_dim // 32), generator=generator, dtype=torch.uint8)
    return EngramTable(data, scales)


def _rows(count: int, columns: int, stop: int) -> Tensor:
    return torch.randint(-1, stop, (count, columns), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(("count", "head_dim"), [(0, 32), (1, 32), (7, 96)])
def test_gathered_rows_have_the_bits_of_the_host(count: int, head_dim: int) -> None:
    table, rows = _table(50, head_dim), _rows(count, 6, 50)
    there = EngramTable(table.data.to(DEVICE), table.scales.to(DEVICE))
    want = gather(table, rows, precision=SERVED).bfloat16()
    assert_equal_bits(gather(there, rows.to(DEVICE), precision=SERVED_BF16), want)
    assert_equal_bits(take(prefetch(table, rows, DEVICE), precision=SERVED_BF16), want)


def test_fetched_rows_have_the_bits_of_gathered_ones_on_the_host() -> None:
    table, rows = _table(50, 64), _rows(9, 6, 50)
    assert_equal_bits(take(prefetch(table, rows, "cpu"), precision=SERVED), gather(table, rows, precision=SERVED))


@needs_device
def test_many_fetches_of_released_size_arrive_in_order() -> None:
    table = _table(100_000, 256)
    fetched = [(rows := _rows(1500 + i, 24, 100_000), prefetch(table, rows, DEVICE)) for i in range(6)]
    for rows, one in fetched:
        want = gather(table, rows, precision=SERVED).bfloat16()
        assert_equal_bits(take(one, precision=SERVED_BF16), want)


def test_a_fetch_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must be in \[-1, 50\), got 50 \.\. 50"):
        prefetch(_table(50, 32), torch.tensor([[50]]), DEVICE)


@pytest.mark.parametrize(("rows", "size"), [(0, 32), (1, 40), (7, 96), (6, 64)])
def test_gate_is_near_the_host(rows: int, size: int) -> None:
    _compare_gate(rows, size)


@needs_device
@pytest.mark.parametrize("rows", [48, 1537])
def test_gate_of_released_size_is_near_the_host(rows: int) -> None:
    _compare_gate(rows, 5120)


def test_rows_do_not_depend_on_their_batch() -> None:
    streams, kv = values(ROWS, 4, 96, seed=1).bfloat16().to(DEVICE), values(ROWS, 480, seed=2).bfloat16().to(DEVICE)
    weight, skip = normal(4, 96, seed=3).to(DEVICE), (torch.arange(ROWS) % 9 == 0).to(DEVICE)
    assert_rows_independent(
        lambda rows: gate(streams[rows], kv[rows], weight, skip[rows], precision=SERVED_BF16), ROWS, sizes=SIZES_ALONE
    )


def _compare_gate(rows: int, size: int) -> None:
    streams, kv = values(rows, 4, size, seed=rows), values(rows, 5 * size, seed=rows + 1)
    weight = gate_weight(normal(4, size, seed=3).bfloat16(), normal(4, size, seed=4).bfloat16())
    skip = torch.arange(rows) % 5 == 2
    given = streams.bfloat16().to(DEVICE), kv.bfloat16().to(DEVICE), weight.to(DEVICE), skip.to(DEVICE)
    got, want = gate(*given, precision=SERVED_BF16), gate(streams, kv, weight, skip, precision=SERVED)
    assert relative_error(got, want) < 2e-3
    assert torch.equal(got[skip.to(DEVICE)].float().cpu(), streams[skip])
