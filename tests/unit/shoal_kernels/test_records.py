"""Compiled record encoding and decoding: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, PagedRows, RecordKind, RowFormat, resolve
from unit.shoal_kernels.parity import ROW_COUNTS, assert_same_bits, values


@pytest.mark.parametrize("kind", list(RecordKind))
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_encoding_and_decoding_agree_to_the_byte(kind: RecordKind, rows: int) -> None:
    encode = {name: resolve("encode_records", "cpu", SERVED, name) for name in ("cpu", "reference")}
    decode = {name: resolve("decode_records", "cpu", SERVED, name) for name in ("cpu", "reference")}
    for scale in (1.0, 1e-4, 1e4, 1e-30, 1e30):
        x = values(rows, 128, seed=rows, bf16=False) * scale
        records = encode["cpu"](x, kind)
        assert torch.equal(records, encode["reference"](x, kind))
        assert_same_bits(decode["cpu"](records, kind, 128), decode["reference"](records, kind, 128))


@pytest.mark.parametrize("kind", list(RecordKind))
def test_every_byte_decodes_alike(kind: RecordKind) -> None:
    layout = RowFormat(kind, 64, SERVED)
    records = torch.arange(256).to(torch.uint8)[:, None].repeat(1, layout.units)
    records[:, layout.data_units :] = 120
    decode = {name: resolve("decode_records", "cpu", SERVED, name) for name in ("cpu", "reference")}
    got, want = (decode[name](records, kind, 64) for name in ("cpu", "reference"))
    finite = ~want.isnan()
    assert_same_bits(got[finite], want[finite])
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("kind", [RecordKind.MAIN, RecordKind.INDEX])
@pytest.mark.parametrize("page_split", [True, False])
def test_compiled_writes_change_the_same_bytes(kind: RecordKind, page_split: bool) -> None:
    layout = RowFormat(kind, 64, SERVED)
    pages = [torch.full((5, 11 + 8 * layout.units), 7, dtype=torch.uint8) for _ in range(2)]
    blocks, slots = torch.tensor([4, 0, 4, 2]), torch.tensor([7, 0, 3, 5])
    for name, page in zip(("cpu", "reference"), pages, strict=True):
        rows = PagedRows(page, 11, 8, layout, page_split)
        resolve("write_records", "cpu", SERVED, name)(rows, blocks, slots, values(4, 64, seed=1))
    assert torch.equal(*pages)


def test_a_place_outside_the_storage_is_refused() -> None:
    layout = RowFormat(RecordKind.MAIN, 64, SERVED)
    rows = PagedRows(torch.zeros(2, 8 * layout.units, dtype=torch.uint8), 0, 8, layout, page_split=False)
    with pytest.raises(ValueError, match=r"block_ids must be in \[0, 2\), got 2 \.\. 2"):
        rows.write(torch.tensor([2]), torch.tensor([0]), torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"slots must be in \[0, 8\), got 8 \.\. 8"):
        rows.write(torch.tensor([1]), torch.tensor([8]), torch.zeros(1, 64))
