"""The CUDA source of the TileLang head, run on the host by 32 threads that play a warp."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from shoal_kernels.ops.lm_head.cuda_source import SOURCE
from shoal_kernels.ops.sampling import coupled_argmax
from torch import Tensor

SUPPORT = Path(__file__).parents[2] / "support"
TOKENS, TILES, ROWS, VOCAB = 256, 3, 13, 3 * 256 - 37
"""A warp has 16 rows; three of them, and some tokens of the last tile, are beyond the end."""

_CALLER = r"""
extern "C" void choose(const float* logits, const float* inverse, const int64_t* seeds, const int64_t* positions,
                       const unsigned char* is_greedy, int rows, int vocab, int tiles, float* values, int* tokens) {
  run_warp([&] {
    const unsigned lane = threadIdx.x;
    float parameters[12], bound[2], most[64], sums[128];
    shoal_rows(inverse, seeds, positions, is_greedy, 0, rows, parameters, bound);
    for (int tile = 0; tile < tiles; ++tile) {
      for (int part = 0; part < 8; ++part) shoal_noise(parameters, tile * 256, part, most + part * 4);
      // The accumulators of wgmma: rows lane / 4 and eight further, two tokens of every eight.
      for (int j = 0; j < 128; ++j) {
        const int row = min((int)lane / 4 + j / 2 % 2 * 8, rows - 1);
        const int token = tile * 256 + j / 4 * 8 + lane % 4 * 2 + j % 2;
        sums[j] = token < vocab ? logits[row * vocab + token] : 0.0f;
      }
      shoal_choose<256>(sums, parameters, most, values, tokens, 0, rows, tile * 256, vocab, tile, tiles, bound);
    }
  });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("warp")
    (folder / "head.cpp").write_text(f'#include "warp_on_host.h"\n{SOURCE}\n{_CALLER}', encoding="utf-8")
    command = ["g++", "-O1", "-std=c++20", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-w", f"-I{SUPPORT}"]
    subprocess.run([*command, "-o", folder / "head.so", folder / "head.cpp"], check=True, timeout=120)
    return ctypes.CDLL(str(folder / "head.so"))


def choose(
    library: ctypes.CDLL, logits: Tensor, inverse: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Best value and token of every tile, [rows, tiles] each."""
    rows, vocab = logits.shape
    values, tokens = torch.full((rows, TILES), torch.nan), torch.full((rows, TILES), -1, dtype=torch.int32)
    tensors = (logits, inverse, seeds, positions, greedy.to(torch.uint8))
    first = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    library.choose(*first, rows, vocab, TILES, ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(tokens.data_ptr()))
    return values, tokens


@pytest.mark.parametrize("kind", ["plain", "flat", "whole", "sharp"])
def test_the_best_of_the_tiles_is_the_token_of_the_exact_noise(library: ctypes.CDLL, kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(ROWS, VOCAB, generator=generator) * (20.0 if kind == "sharp" else 2.0)
    inverse = torch.rand(ROWS, generator=generator) + 0.5
    if kind == "flat":
        logits = torch.zeros(ROWS, VOCAB)
    if kind == "whole":
        # The last place of these values is larger than most noise, so that many of them tie after rounding.
        logits, inverse = logits.round(), torch.full((ROWS,), 2.0**21)
    seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=generator)
    positions = torch.arange(ROWS) + (1 << 33) * (torch.arange(ROWS) % 2)
    greedy = torch.arange(ROWS) % 4 == 0
    values, tokens = choose(library, logits, inverse, seeds, positions, greedy)
    best = values.amax(1, keepdim=True)
    got = torch.where(values == best, tokens.to(torch.int64), VOCAB).amin(1)
    z = torch.where(greedy[:, None], logits, logits * inverse[:, None])
    assert torch.equal(got, coupled_argmax(z, seeds, positions, greedy))
