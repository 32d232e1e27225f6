# mypy: ignore-errors
"""Kernels that show the noise of the sampling kernels word by word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from shoal_kernels.ops.sampling.noise_triton import gumbel_exact, gumbel_fast
from shoal_kernels.triton_lib import EXACT_OPTIONS
from torch import Tensor


@triton.jit
def _noise(words, exact, fast, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    h = tl.load(words + at).to(tl.uint32)
    tl.store(exact + at, gumbel_exact(h))
    tl.store(fast + at, gumbel_fast(h))


@triton.jit
def _largest_error(out, SIZE: tl.constexpr, STEPS: tl.constexpr):
    worst = tl.zeros([SIZE], tl.float32)
    for step in range(STEPS):
        h = ((tl.program_id(0) * STEPS + step).to(tl.int64) * SIZE + tl.arange(0, SIZE)).to(tl.uint32)
        worst = tl.maximum(worst, tl.abs(gumbel_fast(h) - gumbel_exact(h)))
    tl.store(out + tl.program_id(0), tl.max(worst, 0))


def noise_of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Exact and fast noise, float32 [n], of words int64 [n] below 2^32; n is a multiple of 256."""
    exact, fast = (
        torch.full(words.shape, torch.nan, device=words.device),
        torch.full(words.shape, torch.nan, device=words.device),
    )
    _noise[(words.numel() // 256,)](words, exact, fast, SIZE=256, **EXACT_OPTIONS)
    return exact, fast


def largest_error(device: str) -> float:
    """The largest difference between exact and fast noise over all 2^32 words."""
    worst = torch.full((1 << 16,), torch.nan, device=device)
    _largest_error[(1 << 16,)](worst, SIZE=1024, STEPS=64, **EXACT_OPTIONS)
    return float(worst.max())


def cuda_noise_of_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the CUDA source that the TileLang head includes."""
    import tilelang
    from tvm.target import Target

    with Target(_TARGET):
        program = cuda_program(words.numel())
    exact, fast = torch.empty(words.shape, device=words.device), torch.empty(words.shape, device=words.device)
    unsigned = words.to(torch.uint32)
    tilelang.compile(program, target=_TARGET)(unsigned, exact, fast)
    return exact, fast


_TARGET = {"kind": "cuda", "arch": "sm_90a"}


def cuda_program(count: int):
    import tilelang.language as T
    from shoal_kernels.ops.lm_head.cuda_source import SOURCE

    @T.prim_func
    def noise_kernel(
        words: T.Tensor((count,), T.uint32), exact: T.Tensor((count,), T.float32), fast: T.Tensor((count,), T.float32)
    ):
        with T.Kernel(count // 256, threads=256) as block:
            T.import_source(SOURCE)
            for i in T.Parallel(256):
                at = block * 256 + i
                exact[at] = T.call_extern("float32", "shoal_exact", words[at])
                fast[at] = T.call_extern("float32", "shoal_fast", words[at]) * T.float32(-0.6931471805599453)

    return noise_kernel
