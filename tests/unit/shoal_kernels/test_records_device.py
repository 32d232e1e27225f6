"""Cache records on a device: the bytes of the host, in every layout."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.records import copy_rows
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import RecordKind, RowFormat
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, needs_device
from torch import Tensor
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import values

KINDS = list(RecordKind)


def _both(kind: RecordKind, dim: int) -> tuple[RowFormat, RowFormat]:
    return RowFormat(kind, dim, SERVED_BF16), RowFormat(kind, dim, SERVED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), [(0, 64), (1, 32), (7, 64), (5, 96)])
def test_records_have_the_bytes_of_the_host(kind: RecordKind, rows: int, dim: int) -> None:
    _compare(kind, rows, dim)


@needs_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), [(1536, 512), (4099, 128)])
def test_records_of_released_sizes_have_the_bytes_of_the_host(kind: RecordKind, rows: int, dim: int) -> None:
    _compare(kind, rows, dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_split", [False, True])
def test_paged_records_lie_where_the_host_puts_them(kind: RecordKind, page_split: bool) -> None:
    x = values(9, 64, seed=2)
    blocks, slots = torch.arange(9) % 3, torch.arange(9) % 8
    pages = []
    for layout, values_in, device in zip(_both(kind, 64), (x.bfloat16(), x), (DEVICE, "cpu"), strict=True):
        storage = torch.full((3, 8 * layout.units + 48), 7, dtype=torch.uint8, device=device)
        rows = PagedRows(storage, 16, 8, layout, page_split)
        rows.write(blocks.to(device), slots.to(device), values_in.to(device))
        pages.append((storage, rows.read(blocks.to(device), slots.to(device)).bfloat16()))
    assert_equal_bits(pages[0], pages[1])


def test_rows_do_not_depend_on_their_batch() -> None:
    x = values(ROWS, 64, seed=1).bfloat16().to(DEVICE)
    layout = RowFormat(RecordKind.MAIN, 64, SERVED_BF16)
    assert_rows_independent(lambda rows: layout.encode(x[rows]), ROWS, sizes=SIZES_ALONE)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5), torch.float32), ((528,), torch.uint8), ((66,), torch.uint8)])
def test_rows_are_copied_to_their_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    buffer = torch.randint(0, 255, (9, *shape), generator=torch.Generator().manual_seed(1)).to(dtype)
    want = buffer.clone()
    want[[4, 0, 2]] = buffer[[8, 7, 8]]
    got = buffer.to(DEVICE)
    copy_rows(got[:5], _index(4, 0, 2), got[5:], _index(3, 2, 3), precision=SERVED_BF16)
    assert_equal_bits(got, want)
    host = buffer.clone()
    copy_rows(host[:5], torch.tensor([4, 0, 2]), host[5:], torch.tensor([3, 2, 3]), precision=SERVED)
    assert_equal_bits(host, want)


def test_no_rows_are_copied_to_nowhere() -> None:
    buffer = torch.ones(3, 4, device=DEVICE)
    copy_rows(buffer, _index(), buffer[:0], _index(), precision=SERVED_BF16)
    assert buffer.sum() == 12


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        copy_rows(torch.ones(3, 4), torch.tensor([0]), torch.ones(3, 5), torch.tensor([0]), precision=SERVED)


def _index(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=DEVICE)


def _compare(kind: RecordKind, rows: int, dim: int) -> None:
    x = values(rows, dim, seed=3)
    on_device, on_host = _both(kind, dim)
    records = on_host.encode(x)
    assert_equal_bits(on_device.encode(x.bfloat16().to(DEVICE)), records)
    assert_equal_bits(on_device.decode(records.to(DEVICE)), on_host.decode(records).bfloat16())
