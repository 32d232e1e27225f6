"""The experts' Triton kernels compile for Blackwell to its tensor core."""

from __future__ import annotations

import shutil

import pytest
from support.compile_triton import compile_ptx

_MODULE = "shoal_kernels.ops.experts.triton"
_TYPES = {
    "x": "*bf16", "u": "*bf16", "out": "*bf16", "words": "*i32", "scales": "*u8", "starts": "*i32", "order": "*i32",
    "weights": "*fp32", "limit": "fp32",
}  # fmt: skip
_GATE_UP = (
    "x", "words", "scales", "starts", "order", "weights", "u", "limit", "num_experts", "depth", "inner", "u_stride",
)  # fmt: skip
_DOWN = ("u", "words", "scales", "starts", "order", "out", "num_experts", "depth", "dim", "u_stride")

_FORMATS = pytest.mark.parametrize("fp4", [True, pytest.param(False, marks=pytest.mark.long)])

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA tools")


@_FORMATS
def test_sm100_gate_and_up_use_the_tensor_core(fp4: bool) -> None:
    assert "tcgen05.mma" in _compiled("_gate_up", _GATE_UP, fp4=fp4, blocks=20, more={"TOP_K": 6})


@pytest.mark.long
@_FORMATS
def test_sm100_down_uses_the_tensor_core(fp4: bool) -> None:
    assert "tcgen05.mma" in _compiled("_down", _DOWN, fp4=fp4, blocks=9, more={})


def _compiled(kernel: str, parameters: tuple[str, ...], *, fp4: bool, blocks: int, more: dict[str, object]) -> str:
    constants = {
        **more, "ROUTED": fp4, "FP4": fp4, "JOINED": True, "BLOCKS": blocks, "MASK_K": False, "MASK_M": False,
        "EXPERTS": 8, "BLOCK_M": 128, "BLOCK_N": 64,
    }  # fmt: skip
    signature = {name: _TYPES.get(name, "i32") for name in parameters} | dict.fromkeys(constants, "constexpr")
    return compile_ptx(_MODULE, kernel, signature, constants, capability=100, num_warps=8, num_stages=2)
