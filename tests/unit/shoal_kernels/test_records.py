"""Compiled record encoding and decoding: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, RecordKind, RowFormat, resolve
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
