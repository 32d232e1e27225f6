"""Attention compiles for SM100 without such a device, to its own tensor-core instructions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.compile_triton import compile_ptx

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

_POINTERS = {
    "query": "*bf16",
    "window": "*u8",
    "window_index": "*i32",
    "sink": "*fp32",
    "positions": "*i64",
    "cos_sin": "*fp32",
    "storage": "*u8",
    "block_table": "*i32",
    "row_seq": "*i32",
    "topk": "*i32",
    "out": "*bf16",
}
_NUMBERS = ("near_width", "far_width", "near_stride", "far_stride", "table_stride", "block_units")
_PLACES = ("data_offset", "data_stride", "scale_offset", "scale_stride")
_NANO = {
    "HEADS": 8,
    "DIM": 64,
    "PADDED_HEADS": 64,
    "HALF": 32,
    "FREQUENCIES": 8,
    "ENTRIES_PER_BLOCK": 128,
    "TILE": 16,
    "HAS_ENTRIES": True,
    "CAST_OUT": True,
}


@pytest.mark.long
def test_the_triton_attention_compiles_for_sm100() -> None:
    signature = {
        **_POINTERS,
        "factor": "fp32",
        **dict.fromkeys((*_NUMBERS, *_PLACES), "i32"),
        **dict.fromkeys(_NANO, "constexpr"),
    }
    module = "shoal_kernels.ops.sparse_attention.triton"
    assert "tcgen05.mma" in compile_ptx(module, "_attend", signature, _NANO, capability=100)


@pytest.mark.long
@pytest.mark.parametrize(("has_entries", "cast_out"), [(True, True), (False, False)])
def test_the_tilelang_attention_compiles_for_sm100(
    has_entries: bool, cast_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    # Imported here: TileLang takes seconds, and it may be missing where there is no nvcc.
    from shoal_kernels.ops.sparse_attention.tilelang_sm100 import kernel

    kernel(32, has_entries, cast_out).export_ptx(str(tmp_path / "attention.ptx"))
    ptx = (tmp_path / "attention.ptx").read_text()
    assert "tcgen05.mma" in ptx
    assert "tcgen05.ld" in ptx
