"""The Hopper kernel of attention, whole, on the host: 512 threads, with barriers and tensor cores made of C++."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from shoal_kernels import formats
from shoal_kernels.ops.sparse_attention import hopper
from support.cuda_on_host import compile_for_host
from torch import Tensor

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]

# Barriers keep what they count up to, what is missing and a phase in the 64 bits that the kernel gives them. A product
# reads the operands where the descriptors say; the 128-byte swizzle acts on the bits of the address.
_PTX = r"""
#include <condition_variable>
#include <mutex>
static std::barrier<>* everyone;
static void __syncthreads() { everyone->arrive_and_wait(); }
namespace shoal {
typedef unsigned int u32;
typedef unsigned long long u64;
static std::mutex mutex;
static std::condition_variable changed;
static unsigned char* memories[2];
#define memory_start memories[blockIdx.x % shoal::PARTS]
static std::barrier<>* scoring[2];
struct Barrier { uint8_t count, missing; uint16_t phase; int bytes; };
static u32 address_of(const void* p) { return (const unsigned char*)p - memory_start; }
static void init(u64& barrier, int count) { *(Barrier*)&barrier = {(uint8_t)count, (uint8_t)count, 0, 0}; }
static void barriers_made() {}
static void change(void* barrier, int arrivals, int bytes) {
  std::lock_guard lock(mutex);
  Barrier& b = *(Barrier*)barrier;
  b.missing -= arrivals;
  b.bytes += bytes;
  if (b.missing || b.bytes) return;
  b.missing = b.count;
  b.phase ^= 1;
  changed.notify_all();
}
static void arrive(u64& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) change(&barrier, 1, 0);
}
static void expect(u64& barrier, int bytes) { change(&barrier, 1, bytes); }
static u32 in_block(u32 address, u32 rank) { return address | (rank + 1) << 20; }
static void* found(u32 address) { return memories[(address >> 20) - 1] + (address & 0xFFFFF); }
static void send16(u32 to, const float* v, u32 barrier) {
  memcpy(found(to), v, 16);
  change(found(barrier), 0, -16);
}
static void cluster_sync() { __syncthreads(); }
static void wait(u64& barrier, u32 parity) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return ((Barrier*)&barrier)->phase != parity; });
}
static void fence_async() {}
static void warpgroup_sync() { scoring[blockIdx.x % shoal::PARTS]->arrive_and_wait(); }
static void wgmma_fence() {}
static void wgmma_commit() {}
static void wgmma_done() {}
static uint4 load16(const void* from) { return *(const uint4*)from; }
static u32 load2(const void* from) { return *(const uint16_t*)from; }
static void store16(u32 to, uint4 v) { *(uint4*)(memory_start + to) = v; }
static void copy16(u32 to, const void* from) { *(uint4*)(memory_start + to) = *(const uint4*)from; }
static void copies_done() {}
static void hide(int&) {}
template <int COUNT> static void fewer_registers() {}
template <int COUNT> static void more_registers() {}
static void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 mine[4] = {a, b, c, d}, lane = threadIdx.x & 31;
  for (int matrix = 0; matrix < 4; ++matrix)
    *(u32*)(memory_start + __shfl_sync(~0u, to, matrix * 8 + lane / 4) + lane % 4 * 4) = mine[matrix];
}
static float element(u64 operand, int row, int k, bool transposed) {
  u32 start = (operand & 0x3FFF) * 16, leading = (operand >> 16 & 0x3FFF) * 16, stride = (operand >> 32 & 0x3FFF) * 16;
  u32 place = transposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                         : start + row / 8 * stride + row % 8 * 128 + k * 2;
  place ^= place >> 3 & 0x70;
  return bits<float>((u32) * (uint16_t*)(memory_start + place) << 16);
}
template <int COLUMNS, bool TRANSPOSED>
static void multiply(float* d, u64 a, u64 b, int more) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  for (int i = 0; i < COLUMNS / 2; ++i) {
    float sum = more ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += element(a, row + i % 4 / 2 * 8, k, false) * element(b, i / 4 * 8 + quad * 2 + i % 2, k, TRANSPOSED);
    d[i] = sum;
  }
}
static void wgmma_scores(float* s, u64 a, u64 b, int more) { multiply<64, false>(s, a, b, more); }
static void wgmma_sum(float* acc, u64 a, u64 b) { multiply<128, true>(acc, a, b, 1); }
}  // namespace shoal
using shoal::wgmma_scores;
using shoal::wgmma_sum;
static float shoal_exp2(float x) { return exp2f(x); }
static float __int_as_float(int x) { return bits<float>(x); }
"""
_CALL = r"""
extern "C" void attend(
    const void* query, const void* window, const int* window_index, const float* sink, const void* positions,
    const float* cos_sin, const void* storage, const int* block_table, const int* row_seq, const int* topk, void* out,
    float factor, int rows, int near_width, int far_width, int blocks, int units, int per_block, int offset,
    int multiprocessors) {
  static_assert(sizeof(shoal::Small) <= 2048);
  gridDim.x = multiprocessors;
  for (int first = 0; first < multiprocessors; first += shoal::PARTS) {
    std::barrier<> all(512 * shoal::PARTS), four(128), other(128);
    everyone = &all;
    shoal::scoring[0] = &four;
    shoal::scoring[1] = &other;
    for (auto& memory : shoal::memories)
      memset(memory = (unsigned char*)aligned_alloc(1024, 227 * 1024), 0xFF, 227 * 1024);
    cluster(512, first, shoal::PARTS, [=] {
      shoal_attend(query, window, window_index, sink, positions, cos_sin, storage, block_table, row_seq, topk, out,
                   factor, rows, near_width, far_width, blocks, units, per_block, offset, 288,
                   shoal::memories[blockIdx.x % shoal::PARTS]);
    });
    for (auto& memory : shoal::memories) free(memory);
  }
}
"""
_PER_BLOCK, _BLOCKS, _OFFSET = 16, 12, 32
_UNITS = _OFFSET + _PER_BLOCK * 288 + 16


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """For a row on one and on two multiprocessors."""
    text = [
        f"namespace shoal {{ constexpr int PARTS = {parts}; }}" + _PTX + hopper.body(32, True, False)
        for parts in (1, 2)
    ]
    return [compile_for_host(one + _CALL, tmp_path_factory.mktemp("hopper")) for one in text]


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _bytes(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_rows_of_any_lengths_one_after_another_agree_with_float64(libraries: list[ctypes.CDLL]) -> None:
    generator = torch.Generator().manual_seed(3)
    near, far = [100, 64, 0, 0, 1], [70, 0, 65, 0, 3]
    rows = len(near)
    window = _bytes(generator, 0, 64, 200, 528) | (_bytes(generator, 0, 2, 200, 528) << 7)
    window[:, 512:] = _bytes(generator, 124, 129, 200, 16)
    storage = _bytes(generator, 0, 256, _BLOCKS, _UNITS)
    records = storage[:, _OFFSET : _OFFSET + _PER_BLOCK * 288].view(_BLOCKS, _PER_BLOCK, 288)
    records[:, :, 256:] = _bytes(generator, 0x20, 0x30, _BLOCKS, _PER_BLOCK, 32)
    index, topk = (torch.full((rows, width), -1, dtype=torch.int32) for width in (133, 90))
    for row in range(rows):
        index[row, : near[row]] = torch.randint(0, 200, (near[row],), generator=generator)
        topk[row, : far[row]] = torch.randperm(_BLOCKS // 2 * _PER_BLOCK, generator=generator)[: far[row]].sort().values
    table = torch.randperm(_BLOCKS, generator=generator).to(torch.int32).view(2, _BLOCKS // 2)
    sequence = torch.arange(rows, dtype=torch.int32) % 2
    query = torch.randn(rows, 64, 512, generator=generator).to(torch.bfloat16)
    sink = torch.randn(64, generator=generator)
    positions, angles = torch.arange(rows) % 3, torch.randn(3, 64, generator=generator)
    one, two = (torch.full((rows, 64, 512), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    tensors = query, window, index, sink, positions, angles, storage, table, sequence, topk
    factor = ctypes.c_float(512**-0.5 * 1.4426950408889634 * 1024)
    sizes = rows, 133, 90, _BLOCKS // 2, _UNITS, _PER_BLOCK, _OFFSET
    for library, out, multiprocessors in zip(libraries, (one, two), (3, 4), strict=True):
        library.attend(*map(_address, (*tensors, out)), factor, *sizes, multiprocessors)
    assert torch.equal(one, two)
    for row in range(rows):
        seen, chosen = index[row, : near[row]].long(), topk[row, : far[row]].long()
        picked = records[table[sequence[row]].long()[chosen // _PER_BLOCK], chosen % _PER_BLOCK]
        keys = torch.cat(
            (
                formats.decode_q8(window[seen, :512], window[seen, 512:]),
                formats.decode_q4nv(picked[:, :256], picked[:, 256:]),
            )
        ).double()
        scores = torch.cat((query[row].double() @ keys.T * 512**-0.5, sink.double()[:, None]), dim=1)
        want = scores.softmax(dim=1)[:, :-1] @ keys
        even, odd, angle = want[:, 448::2].clone(), want[:, 449::2].clone(), angles[positions[row]].double()
        want[:, 448::2] = even * angle[:32] + odd * angle[32:]
        want[:, 449::2] = odd * angle[:32] - even * angle[32:]
        error = (one[row].double() - want).norm(dim=1)
        assert (error <= 1e-2 * want.norm(dim=1)).all()
