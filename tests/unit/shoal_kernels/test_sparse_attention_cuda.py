"""The CUDA functions of attention, run on the host: tiles hold exactly what the records say, outputs are finished."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from shoal_kernels import formats
from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER
from support.cuda_on_host import compile_for_host
from torch import Tensor

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_CALLS = r"""
extern "C" void gather(const int* index, int index_width, const int* topk, int topk_width, const int* table, int t,
                       int per_block, int units, int offset, const unsigned char* window, const unsigned char* storage,
                       void* left, void* right) {
  warpgroup([=] {
    unsigned raw[32], gains[8];
    int places[2], near = shoal_count(index, index_width), far = shoal_count(topk, topk_width);
    shoal_places(places, index, topk, table, t, near, far, per_block, units, offset, 288);
    shoal_load(raw, gains, places, window, storage, t, near);
    shoal_store(raw, gains, places, window, t, near, left, right);
  });
}
extern "C" void load_query(const void* query, void* tile, int part) {
  warpgroup([=] { shoal_load_query(query, tile, part); });
}
extern "C" void finish(const float* acc, const float* total, const float* angles, void* out, int first, int cast) {
  warpgroup([=] {
    const float* mine = acc + threadIdx.x * 128;
    int head = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float inverse[2] = {1024.0f / total[head], 1024.0f / total[head + 8]};
    if (cast) shoal_finish_as<true, 32, 256>(mine, inverse, angles, (__nv_bfloat16*)out, first);
    else shoal_finish_as<false, 32, 256>(mine, inverse, angles, (__nv_bfloat16*)out, first);
  });
}
"""
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_PER_BLOCK, _BLOCKS, _OFFSET = 16, 12, 32
_UNITS = _OFFSET + _PER_BLOCK * 288 + 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_for_host(GATHER + FINISH + _CALLS, tmp_path_factory.mktemp("cuda"))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _plain(tile: Tensor) -> Tensor:
    """[64, 256] float32 of a swizzled tile."""
    key, octet = torch.arange(64)[:, None], torch.arange(32)[None, :]
    start = octet // 8 * 4096 + key * 64 + (octet % 8 ^ key % 8) * 8
    values = torch.empty(64, 32, 8)
    values[:, :, _ORDER] = tile[start[..., None] + torch.arange(8)].to(torch.float32)
    return values.reshape(64, 256)


def _random_bytes(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("near", "far"), [(100, 70), (64, 0), (0, 65), (0, 0)])
def test_a_tile_holds_the_exact_values_of_its_records(library: ctypes.CDLL, near: int, far: int) -> None:
    generator = torch.Generator().manual_seed(near + far)
    window = _random_bytes(generator, 0, 127, 200, 528) | (_random_bytes(generator, 0, 2, 200, 528) << 7)
    window[:, 512:] = _random_bytes(generator, 90, 150, 200, 16)
    storage = _random_bytes(generator, 0, 256, _BLOCKS, _UNITS)
    records = storage[:, _OFFSET : _OFFSET + _PER_BLOCK * 288].view(_BLOCKS, _PER_BLOCK, 288)
    records[:, :, 256:] = _random_bytes(generator, 0, 127, _BLOCKS, _PER_BLOCK, 32)  # subnormal scales too
    index, topk = torch.full((133,), -1, dtype=torch.int32), torch.full((90,), -1, dtype=torch.int32)
    index[:near] = torch.randint(0, 200, (near,), generator=generator)
    topk[:far] = torch.randperm(_BLOCKS * _PER_BLOCK, generator=generator)[:far].sort().values
    table = torch.randperm(_BLOCKS, generator=generator).to(torch.int32)
    seen, chosen = index[:near].long(), topk[:far].long()
    near_keys = formats.decode_q8(window[seen, :512], window[seen, 512:])
    picked = records[table.long()[chosen // _PER_BLOCK], chosen % _PER_BLOCK]
    far_keys = formats.decode_q4nv(picked[:, :256], picked[:, 256:])
    tiles = (
        [*near_keys.split(64), *far_keys.split(64)] if near and far else [*(near_keys if near else far_keys).split(64)]
    )
    for t, want in enumerate(tiles or [torch.empty(0, 512)]):
        left, right = (torch.full((16384,), torch.nan, dtype=torch.bfloat16) for _ in range(2))
        lists = _address(index), len(index), _address(topk), len(topk), _address(table)
        sizes = t, _PER_BLOCK, _UNITS, _OFFSET
        library.gather(*lists, *sizes, _address(window), _address(storage), _address(left), _address(right))
        got = torch.cat((_plain(left), _plain(right)), dim=1) * 1024.0
        assert torch.equal(got[: len(want)], want)
        assert not got[len(want) :].any()


def test_a_tile_of_queries_has_the_order_of_the_keys(library: ctypes.CDLL) -> None:
    query = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for part in (0, 2):
        tile = torch.empty(16384, dtype=torch.bfloat16)
        library.load_query(_address(query), _address(tile), part)
        assert torch.equal(_plain(tile), query[:, part * 128 : part * 128 + 256].to(torch.float32))


@pytest.mark.parametrize("first", [0, 256])
@pytest.mark.parametrize("cast", [False, True])
def test_accumulators_are_divided_rotated_back_and_cast(library: ctypes.CDLL, first: int, cast: bool) -> None:
    generator = torch.Generator().manual_seed(first + cast)
    sums = torch.randn(64, 32, 8, generator=generator) * torch.randint(1, 500, (64, 1, 1), generator=generator)
    sums[3] = 0.0
    total, angles = torch.rand(64, generator=generator) + 0.5, torch.randn(64, generator=generator)
    want = (sums * (1024.0 / total)[:, None, None]).to(torch.bfloat16).to(torch.float32).reshape(64, 256)
    if first:
        even, odd, cos, sin = want[:, 192::2].clone(), want[:, 193::2].clone(), angles[:32], angles[32:]
        want[:, 192::2], want[:, 193::2] = even * cos + odd * sin, odd * cos - even * sin
        want = want.to(torch.bfloat16).to(torch.float32)
    if cast:
        want = formats.decode_q8(*formats.encode_q8(want))
    thread, place = torch.arange(128)[:, None], torch.arange(128)[None, :]
    head = thread // 32 * 16 + thread % 32 // 4 + place // 2 % 2 * 8
    column = place // 4 * 8 + thread % 4 * 2 + place % 2
    accumulators = sums[:, :, _ORDER].reshape(64, 256)[head, column].contiguous()
    out = torch.full((64, 512), torch.nan, dtype=torch.bfloat16)
    library.finish(_address(accumulators), _address(total), _address(angles), _address(out), first, int(cast))
    assert torch.equal(out[:, first : first + 256].to(torch.float32), want)
