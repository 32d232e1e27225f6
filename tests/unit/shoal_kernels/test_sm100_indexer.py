"""The indexer's tensor-core kernel compiles for SM100 without a GPU, of all entries and of candidates."""

from __future__ import annotations

import shutil

import pytest
from support.compile_triton import compile_ptx

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA toolkit")

_POINTERS = {
    "query": "*bf16",
    "weights": "*bf16",
    "storage": "*u8",
    "table": "*i32",
    "row_seq": "*i32",
    "starts": "*i32",
    "tiles": "*i32",
    "count": "*i32",
    "out": "*bf16",
    "coarse": "*bf16",
    "listed": "*i32",
    "places": "*i16",
    "lengths": "*i32",
    "stops": "*i32",
}
_SIZES = ("block_units", "section", "per_block", "table_width", "width", "list_width", "rows")
_RELEASED = {"HEADS": 32, "HP": 32, "DIM": 128, "PAGE_SPLIT": True, "TILE": 64}


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sm100_scores_are_tcgen05_products(listed: bool) -> None:
    constants = {"SIZE": 8 if listed else 1, "LISTED": listed, "CHUNK": 64, **_RELEASED}
    signature = {**_POINTERS, **dict.fromkeys(_SIZES, "i32"), **dict.fromkeys(constants, "constexpr")}
    ptx = compile_ptx("shoal_kernels.ops.indexer.scores_triton", "_score_groups", signature, constants, capability=100)
    assert "tcgen05.mma" in ptx
    assert ".target sm_100a" in ptx
