"""The linears compile for SM100 without such a device, to its own tensor-core instructions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.compile_triton import compile_ptx

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

SIGNATURE = {
    "x": "*bf16",
    "data": "*u8",
    "scale": "*u8",
    "out": "*bf16",
    **dict.fromkeys(("x_stride", "rows", "columns", "depth", "scale_columns", "units", "segments"), "i32"),
    **dict.fromkeys(("QUANTISED", "MERGED", "ROUND", "ROWS", "COLUMNS", "STEP"), "constexpr"),
}


@pytest.mark.long
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_the_triton_linear_compiles_for_sm100(rows: int) -> None:
    constants = {"QUANTISED": True, "MERGED": True, "ROUND": True, "ROWS": rows, "COLUMNS": 128, "STEP": 64}
    warps = 8 if rows == 128 else 4
    module = "shoal_kernels.ops.linear.triton"
    ptx = compile_ptx(module, "_linear", SIGNATURE, constants, capability=100, num_warps=warps)
    assert "tcgen05.mma" in ptx


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "split", "quantised"),
    [
        (128, 1, True),
        (48, 2, True),
        (128, 1, False),
    ],
)
def test_the_tilelang_linear_compiles_for_sm100(
    rows: int, split: int, quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    from shoal_kernels.ops.linear.tilelang import compiled
    from shoal_kernels.ops.linear.tiles import plan

    kernel = compiled(plan(rows, split, quantised), quantised, not quantised, True, arch="sm_100a")
    kernel.export_ptx(str(tmp_path / "linear.ptx"))
    ptx = (tmp_path / "linear.ptx").read_text()
    assert "tcgen05.mma" in ptx
    assert "tcgen05.ld" in ptx
