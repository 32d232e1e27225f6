"""The row-wise kernels compile for Blackwell too; they have no matrix products, so there is no tcgen05 to look for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import pytest
from support.compile_triton import compile_ptx
from support.seldom import seldom

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA toolkit")


def test_window_rows_compile_for_sm100_with_packed_e4m3() -> None:
    signature = {
        "x": "*bf16",
        "x_steps": "i32",
        "weight": "*fp32",
        "eps": "fp32",
        "positions": "*i64",
        "cos_sin": "*fp32",
        "out": "*u8",
    }
    constants = {
        "UNITS": 528,
        "STEP": 8,
        "FREQUENCIES": 32,
        "DIM": 512,
        "PAIRS": 256,
        "TO_RECORD": True,
    }
    ptx = _compile("norm_rope", "_norm_rope", signature, constants)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.long
def test_the_engram_gate_compiles_for_sm100() -> None:
    signature = {
        "streams": "*bf16",
        "kv": "*bf16",
        "weight": "*fp32",
        "skip": "*i1",
        "rms_eps": "fp32",
        "root": "fp32",
        "out": "*bf16",
        "rows": "i32",
        "rows_each": "i32",
    }
    sizes = {"STREAMS": 4, "DIM": 5120, "PARTS": 4, "SIZE": 1024, "HAS_MORE": True, "STAGES": 2}
    _compile("engram", "_gate", signature, sizes)


@pytest.mark.parametrize(("capability", "target"), [(100, "sm_100a"), *seldom((90, "sm_90a"))])
def test_edits_with_packed_masks_compile_for_hopper_and_sm100(capability: int, target: str) -> None:
    signature = {
        "logits": "*fp32",
        "stride": "i32",
        "out": "*fp32",
        "numbers": "*fp32",
        "places": "*i64",
        "counts": "*i32",
        "seen": "*i8",
        "allowed": "*i32",
        "vocab": "i32",
        "BLOCK": "constexpr",
    }
    module = "shoal_kernels.ops.sampling.edit_triton"
    assert f".target {target}" in compile_ptx(module, "_edit_rows", signature, {"BLOCK": 2048}, capability=capability)


def _compile(op: str, kernel: str, signature: Mapping[str, str], constants: Mapping[str, object]) -> str:
    whole = {**signature, **dict.fromkeys(constants, "constexpr")}
    ptx = compile_ptx(f"shoal_kernels.ops.{op}.triton", kernel, whole, constants, capability=100, num_warps=4)
    assert ".target sm_100a" in ptx
    return ptx
