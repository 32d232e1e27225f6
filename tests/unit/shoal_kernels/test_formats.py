"""Casts, records and weights against the golden bytes and the printed vectors of the specification."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import EXACT, SERVED, PagedRows, formats, index_format, main_format, window_format
from unit.shoal_kernels.golden_units import golden


def test_q8_bytes_equal_the_golden_ones() -> None:
    data, scales = formats.encode_q8(golden("cast.x"))
    assert torch.equal(data, golden("cast.q8.bytes"))
    assert torch.equal(scales, golden("cast.q8.scale_bytes"))
    assert torch.equal(formats.decode_q8(data, scales), golden("cast.q8.value"))


def test_q4ue_bytes_equal_the_golden_ones() -> None:
    data, scales = formats.encode_q4ue(golden("cast.x"))
    assert torch.equal(data, golden("cast.q4ue.packed"))
    assert torch.equal(scales, golden("cast.q4ue.scale_bytes"))
    assert torch.equal(formats.decode_q4ue(data, scales), golden("cast.q4ue.value"))


def test_q4nv_bytes_equal_the_golden_ones() -> None:
    data, scales = formats.encode_q4nv(golden("cast.x"))
    assert torch.equal(data, golden("cast.q4nv.packed"))
    assert torch.equal(scales, golden("cast.q4nv.scale_bytes"))
    assert torch.equal(formats.decode_q4nv(data, scales), golden("cast.q4nv.value"))


def test_weights_dequantise_to_the_golden_values() -> None:
    fp8 = formats.dequantise_fp8_weight(golden("weight.fp8"), golden("weight.fp8_scale"))
    assert torch.equal(fp8, golden("weight.fp8_value"))
    fp4 = formats.dequantise_fp4_weight(golden("weight.fp4"), golden("weight.fp4_scale"))
    assert torch.equal(fp4, golden("weight.fp4_value"))


def test_records_equal_the_golden_bytes() -> None:
    x = golden("cast.x").to(torch.float32)
    assert torch.equal(window_format(512, SERVED).encode(x), golden("record.window"))
    assert torch.equal(main_format(512, SERVED).encode(x), golden("record.main"))


def test_an_index_page_is_split_into_data_and_scales() -> None:
    page = torch.zeros(1, 16 * 68, dtype=torch.uint8)
    rows = PagedRows(page, 0, 16, index_format(128, SERVED), page_split=True)
    values = golden("record.index_in").to(torch.float32)
    rows.write(torch.zeros(16, dtype=torch.int64), torch.arange(16), values)
    assert torch.equal(page[0], golden("record.index_page"))
    read = rows.read(torch.zeros(16, dtype=torch.int64), torch.arange(16))
    assert torch.equal(read, formats.decode_q4ue(*formats.encode_q4ue(values)))


def test_released_records_have_the_released_sizes() -> None:
    sizes = window_format(512, SERVED).units, main_format(512, SERVED).units, index_format(128, SERVED).units
    assert sizes == (528, 288, 68)


def test_printed_vectors_of_the_specification() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert formats.encode_e2m1(x).tolist() == [0 | 2 << 4, 2 | 4 << 4, 4 | 6 << 4, 6 | 7 << 4]
    assert formats.encode_e2m1(-x).tolist() == [8 | 10 << 4, 10 | 12 << 4, 12 | 14 << 4, 14 | 15 << 4]
    data, scale = formats.encode_q4nv(torch.arange(1, 17) / 4)
    assert scale.tolist() == [51]
    assert data.tolist() == [17, 50, 68, 85, 101, 102, 118, 119]
    data, scale = formats.encode_q4ue(torch.arange(1.0, 33.0))
    assert scale.tolist() == [130]
    assert data.tolist() == [0, 17, 33, 34, 34, 51, 67, 68, 68, 68, 85, 85, 85, 101, 102, 102]
    data, scale = formats.encode_q8(torch.arange(1.0, 33.0))
    assert scale.tolist() == [124]
    assert data[:4].tolist() == [80, 88, 92, 96]
    assert data[-4:].tolist() == [118, 119, 120, 120]


def test_a_zero_group_keeps_the_floor_scale_and_the_sign_of_zero() -> None:
    data, scale = formats.encode_q4nv(torch.full((16,), -0.0))
    assert data.tolist() == [0x88] * 8
    assert formats.decode_e4m3(scale).item() == 2.0**-9


def test_uncast_records_hold_the_values_themselves() -> None:
    layout = main_format(24, EXACT)
    assert (layout.units, layout.storage_dtype) == (24, torch.float64)
    storage = torch.zeros(3, 4 * 24, dtype=torch.float64)
    rows = PagedRows(storage, 0, 4, layout, page_split=False)
    values = torch.randn(2, 24, dtype=torch.float64)
    rows.write(torch.tensor([2, 1]), torch.tensor([3, 0]), values)
    assert torch.equal(rows.read(torch.tensor([2, 1]), torch.tensor([3, 0])), values)


def test_bytes_written_by_row_come_back_by_row() -> None:
    storage = torch.zeros(4, 100 + 8 * 68, dtype=torch.uint8)
    rows = PagedRows(storage, 100, 8, index_format(128, SERVED), page_split=True)
    records = torch.randint(0, 256, (5, 68), dtype=torch.uint8)
    blocks, slots = torch.tensor([0, 3, 3, 1, 2]), torch.tensor([7, 0, 5, 2, 2])
    rows.write_bytes(blocks, slots, records)
    assert torch.equal(rows.read_bytes(blocks, slots), records)
    assert int((storage[:, :100] != 0).sum()) == 0


def test_bad_shapes_are_refused_with_the_sizes_in_the_message() -> None:
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        formats.encode_q8(torch.zeros(33))
    with pytest.raises(ValueError, match=r"must be \[2, 1\], got \[1, 1\]"):
        formats.dequantise_fp8_weight(torch.zeros(33, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="exceeds 10 units"):
        PagedRows(torch.zeros(1, 10, dtype=torch.uint8), 0, 1, index_format(128, SERVED), page_split=True)
