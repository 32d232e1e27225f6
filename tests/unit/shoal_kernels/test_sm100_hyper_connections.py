"""mix compiles to the tensor cores of Blackwell without one; run nowhere here."""

from __future__ import annotations

import shutil

import pytest
from support.compile_triton import compile_ptx

SIGNATURE = {"streams": "*bf16", "fn": "*bf16", "out": "*fp32", "rows": "i32"}
SIZES = {"K": 20480, "M": 24, "PARTS": 2, "COLS": 32, "LENGTH": 1280, "STEP": 64, "BLOCK": 64, "OVERLAPS": True}

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")


def _ptx(capability: int) -> str:
    return compile_ptx(
        "shoal_kernels.ops.hyper_connections.mix_triton",
        "partial_kernel",
        {**SIGNATURE, **dict.fromkeys(SIZES, "constexpr")},
        SIZES,
        capability=capability,
        num_warps=4,
        num_stages=4,
    )


def test_sm100_mix_uses_tcgen05() -> None:
    assert "tcgen05.mma" in _ptx(100)


@pytest.mark.long
def test_mix_uses_wgmma_on_hopper() -> None:
    assert "wgmma.mma_async" in _ptx(90)
