"""Layouts of the experts on an accelerator: packed words, sorted rows, and the Hopper kernel's text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from shoal_kernels.formats import decode_q8, dequantise_fp4_weight, dequantise_fp8_weight, encode_q8
from shoal_kernels.ops.experts.packing import pack_fp4, pack_fp8
from support.on_device import DEVICE

_FP4_MASK, _FP8_MASK, _FP8_HIGH = 0x81C081C0 - (1 << 32), 0x87F087F0 - (1 << 32), 0x87808780 - (1 << 32)


def _bytes(low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_fp4_words_hold_the_values_of_the_weight() -> None:
    data, scale = _bytes(0, 256, 48, 320), _bytes(0, 129, 48, 20)
    words, scales = pack_fp4(data, scale)
    a, b = _straight(words).unbind(1)
    rest = (a & 0x0C180C18) | ((b << 2) & ~0x0C180C18)
    moved = (a, _turned(a, 6), a << 6, b, _turned(b, 6), b << 6, _turned(rest, 4), rest << 2)
    assert torch.equal(_values([pair & _FP4_MASK for pair in moved], scales, 640), dequantise_fp4_weight(data, scale))


def test_fp8_words_hold_the_values_of_the_weight() -> None:
    data, scale = _bytes(0, 0x7F, 64, 320), _bytes(0, 135, 2, 10)
    words, scales = pack_fp8(data, scale)
    planes = []
    for word in _straight(words).unbind(1):
        planes += [word & _FP8_MASK, (_turned(word, 4) & _FP8_HIGH) | ((word << 4) & 0x00700070)]
    assert torch.equal(_values(planes, scales, 320), dequantise_fp8_weight(data, scale))


def _straight(words: torch.Tensor) -> torch.Tensor:
    """Columns back in order."""
    straight: torch.Tensor = words.unflatten(-1, (4, 4)).mT.flatten(-2)
    return straight


def _turned(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x >> bits) & ((1 << (32 - bits)) - 1)) | (x << (32 - bits))


def _values(planes: list[torch.Tensor], scales: torch.Tensor, depth: int) -> torch.Tensor:
    """Pairs [blocks, N, 16] of eight planes -> [N, depth]."""
    pairs = torch.stack(planes, 1)
    bits = torch.stack((pairs << 16, pairs & -65536), -1).flatten(-2)
    values = bits.view(torch.float32) * (scales.transpose(1, 2).to(torch.int32) << 23).view(torch.float32)[..., None]
    return values.permute(2, 0, 1, 3).reshape(pairs.shape[2], -1)[:, :depth]


@pytest.mark.parametrize("few", [1024, 0])
def test_rows_stand_in_the_slots_of_their_experts(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    from shoal_kernels.ops.experts import triton_slots

    monkeypatch.setattr(triton_slots, "_FEW", few)
    rows, dim, top_k, count = 9, 128, 2, 5
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, dim, generator=generator).to(torch.bfloat16).to(DEVICE)
    ids = torch.rand(rows, count, generator=generator).argsort(1)[:, :top_k].to(torch.int32).contiguous().to(DEVICE)
    weights = torch.rand(rows, top_k, generator=generator).to(DEVICE)
    slots = triton_slots.spread_rows(x, ids, weights, count, shared=True)
    want = decode_q8(*encode_q8(x.float()))
    starts, tiles = slots.starts.tolist(), slots.x.view(dim // 64, slots.groups, 8, 8, 8)
    for expert in range(count + 1):
        for place in range(starts[expert + 1] - starts[expert]):
            slot = -(-starts[expert] // 8) * 8 + 8 * expert + place
            pair = int(slots.slot_pair[slot])
            row = pair // top_k if expert < count else pair - rows * top_k
            if expert < count:
                assert int(ids.flatten()[pair]) == expert
                assert slots.slot_weight[slot] == weights.flatten()[pair]
            stored = tiles[:, slot // 8, slot % 8][:, [chunk ^ slot % 8 for chunk in range(8)]]
            assert torch.equal(stored.flatten().float(), want[row])


def test_tiles_hold_the_rows_of_an_expert_with_room_for_chance() -> None:
    from shoal_kernels.ops.experts.tilelang import row_tile

    certain = {rows: row_tile(rows, certain=True) for rows in (1, 16, 17, 48, 49, 128, 129, 360, 1536)}
    assert certain == {1: 16, 16: 16, 17: 32, 48: 48, 49: 64, 128: 128, 129: 96, 360: 128, 1536: 128}
    assert [row_tile(rows, certain=False) for rows in (1, 9, 48, 128, 360)] == [16, 16, 64, 96, 128]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("columns", [16, 48, 64, 96, 128])
@pytest.mark.parametrize("gate_up", [True, False])
def test_the_hopper_kernel_keeps_everything_in_registers(tmp_path: Path, columns: int, gate_up: bool) -> None:
    from shoal_kernels.ops.experts import hopper

    text = hopper.source(columns=columns, rows=4608, blocks=20, gate_up=gate_up)
    (tmp_path / "kernel.cu").write_text(f"""{text}
extern "C" __global__ void __launch_bounds__({hopper.threads(columns)}, 1) kernel(
    const void* x, const void* words, const void* scales, const void* shared_words, const void* shared_scales,
    const int* starts, const int* pairs, const float* weights, void* out, float limit, int groups,
    int experts, int first, int last, int late) {{
  extern __shared__ __align__(1024) unsigned char memory[];
  expert_product(x, words, scales, shared_words, shared_scales, starts, pairs, weights, out, limit, groups, experts,
                 first, last, late, memory);
}}""")
    command = ["nvcc", "-cubin", "-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    command += ["-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert "serialized" not in done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")
def test_tilelang_launches_the_hopper_kernel_ahead_of_the_end_of_the_grid_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tilelang")
    from shoal_kernels.ops.experts import hopper

    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    kernel = hopper.compiled(columns=16, rows=512, blocks=2, gate_up=True)
    source = kernel.get_kernel_source()
    assert "__launch_bounds__(512, 1)" in source
    assert "cudaGridDependencySynchronize" in source
