"""The LM head for Blackwell, compiled where there is none."""

from __future__ import annotations

import shutil

import pytest
from support.compile_triton import compile_ptx

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA toolkit")

_HOW = {
    "inverse_temperature": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "is_greedy": "*i1",
    "values": "*fp32",
    "tokens": "*i32",
    "rows": "i32",
    "vocab": "i32",
    "parts": "i32",
}
_CONSTANTS = {"BLOCK_R": 128, "BLOCK_V": 128, "BLOCK_K": 64, "SLICE": 64, "FUSED": False}


def _ptx(module: str, kernel: str, first: dict[str, str], last: dict[str, str], depth: int) -> str:
    constants = {"DEPTH": depth, **_CONSTANTS}
    signature = {**first, **_HOW, **last, **dict.fromkeys(constants, "constexpr")}
    return compile_ptx(
        f"shoal_kernels.ops.lm_head.{module}", kernel, signature, constants, capability=100, num_warps=8, num_stages=4
    )


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_head_compiles_for_sm100_with_its_tensor_cores() -> None:
    ptx = _ptx("triton", "_head_tile", {"x": "tensordesc<bf16[128,64]>", "w": "tensordesc<bf16[128,64]>"}, {}, 5120)
    assert "tcgen05.mma" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.timeout(120)
def test_the_markov_head_compiles_for_sm100_with_its_tensor_cores() -> None:
    first = {"base": "*fp32", "stride_n": "i32", "embed": "*bf16", "previous": "*i64", "previous_stride": "i32"}
    ptx = _ptx("markov_triton", "_markov_tile", {**first, "w": "tensordesc<bf16[128,64]>"}, {"ahead": "i32"}, 256)
    assert "tcgen05.mma" in ptx
