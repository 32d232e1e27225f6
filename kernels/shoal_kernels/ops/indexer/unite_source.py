# mypy: ignore-errors
"""CUDA function that unites the candidate blocks of a group of rows, for one block of 512 threads: a set of bits in
shared memory, a prefix sum of their numbers, and each row's place of every block."""

UNITE = r"""
#include <stdint.h>

namespace shoal {

constexpr int kThreads = 512, kGroup = 6;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// The first row of the run of rows of one sequence that ends with `row`.
__device__ __forceinline__ int find_run(const int32_t* row_seq, int row, int32_t* found) {
  int sequence = row_seq[row];
  if (threadIdx.x == 0) *found = -1;
  __syncthreads();
  for (int base = row;; base -= kThreads) {
    int at = base - static_cast<int>(threadIdx.x);
    bool begins = at >= 0 && (at == 0 || row_seq[at - 1] != sequence);
    if (begins) atomicMax(found, at);
    if (__syncthreads_or(begins)) return *found;
  }
}

// WORDS of 32 blocks each hold all; `memory` has WORDS words of bits, as many numbers of the bits before, and 32 more.
template <int WORDS>
__device__ __forceinline__ void unite(
    const int32_t* candidates, const int32_t* row_seq, const int64_t* n_vis, int row, int rows, int listed, int bound,
    int32_t* blocks, int16_t* places, int32_t* lengths, int32_t* stops, int32_t* memory) {
  constexpr int kWords = WORDS / kThreads;
  uint32_t* bits = reinterpret_cast<uint32_t*>(memory);
  int32_t *before = memory + WORDS, *sums = memory + 2 * WORDS;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int run = find_run(row_seq, row, sums + 16);
  if ((row - run) % kGroup) {
    if (thread == 0) lengths[row] = 0, stops[row] = row;
    return;
  }
  int stop = row + 1;
  while (stop < min(row + kGroup, rows) && row_seq[stop] == row_seq[row]) ++stop;
#pragma unroll
  for (int i = 0; i < kWords; ++i) bits[i * kThreads + thread] = 0;
  __syncthreads();
  for (int r = row; r < stop; ++r) {
    int64_t seen = n_vis[r];
    int end = static_cast<int>(seen < bound ? seen : bound);
#pragma unroll 4
    for (int j = thread; j < listed; j += kThreads) {
      int block = candidates[static_cast<int64_t>(r) * listed + j];
      if (block >= 0 && block < (end + 7) / 8) atomicOr(bits + (block >> 5), 1u << (block & 31));
    }
  }
  __syncthreads();
  uint32_t own[kWords];
  int number = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) number += __popc(own[i] = bits[thread * kWords + i]);
  int through = number;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(kAll, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  int of_warp = lane < 16 ? sums[lane] : 0;
  int total = __reduce_add_sync(kAll, of_warp);
  int at = __reduce_add_sync(kAll, lane < warp ? of_warp : 0) + through - number;
  int32_t* own_blocks = blocks + static_cast<int64_t>(row) * listed;
  int4* own_places = reinterpret_cast<int4*>(places + static_cast<int64_t>(row) * listed * 8);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    int word = thread * kWords + i;
    before[word] = at;
    for (uint32_t left = own[i]; left; left &= left - 1) own_blocks[at++] = word * 32 + __ffs(left) - 1;
  }
  for (int u = thread; u < total; u += kThreads) own_places[u] = make_int4(-1, -1, -1, -1);
  __syncthreads();
  for (int r = row; r < stop; ++r) {
    int64_t seen = n_vis[r];
    int end = static_cast<int>(seen < bound ? seen : bound);
#pragma unroll 4
    for (int j = thread; j < listed; j += kThreads) {
      int block = candidates[static_cast<int64_t>(r) * listed + j];
      if (block >= 0 && block < (end + 7) / 8) {
        int u = before[block >> 5] + __popc(bits[block >> 5] & ((1u << (block & 31)) - 1));
        reinterpret_cast<int16_t*>(own_places + u)[r - row] = static_cast<int16_t>(j);
      }
    }
  }
  if (thread == 0) lengths[row] = total, stops[row] = stop;
}

}  // namespace shoal

#define SHOAL_UNITE(WORDS)                                                                                             \
  extern "C" __device__ __forceinline__ void shoal_unite_##WORDS(                                                      \
      const void* candidates, const void* row_seq, const void* n_vis, int row, int rows, int listed, int bound,        \
      void* blocks, void* places, void* lengths, void* stops, void* memory) {                                          \
    shoal::unite<WORDS>(                                                                                               \
        static_cast<const int32_t*>(candidates), static_cast<const int32_t*>(row_seq),                                 \
        static_cast<const int64_t*>(n_vis), row, rows, listed, bound, static_cast<int32_t*>(blocks),                   \
        static_cast<int16_t*>(places), static_cast<int32_t*>(lengths), static_cast<int32_t*>(stops),                   \
        static_cast<int32_t*>(memory));                                                                                \
  }
"""


def unite_source(words: int) -> str:
    """CUDA source with the function `shoal_unite_{words}`."""
    return f"{UNITE}\nSHOAL_UNITE({words})\n"
