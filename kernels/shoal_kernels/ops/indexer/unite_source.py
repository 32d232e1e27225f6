# mypy: ignore-errors
"""CUDA function that unites the candidate blocks of a group of rows, for one block of 512 threads: a set of bits in
shared memory, a prefix sum of their numbers, and each row's place of every block."""

UNITE = r"""
#include <stdint.h>

namespace shoal {

constexpr int kThreads = 512, kGroup = 6;
constexpr uint32_t kAll = 0xFFFFFFFFu;

// The first row of the run of rows of one sequence that ends with `row`: every warp looks for itself.
__device__ __forceinline__ int find_run(const int32_t* row_seq, int row) {
  int sequence = row_seq[row];
  for (int base = row;; base -= 32) {
    int at = base - static_cast<int>(threadIdx.x & 31);
    uint32_t begins = __ballot_sync(kAll, at <= 0 || row_seq[at - 1] != sequence);
    if (begins) return base - __ffs(begins) + 1;
  }
}

// Blocks 4 * i .. 4 * i + 3 of the group's lists, which stand one after the other; -1 for what is not listed.
__device__ __forceinline__ int4 load_four(const int32_t* lists, int i, int size, bool aligned) {
  int at = 4 * i;
  if (aligned) return at < size ? __ldg(reinterpret_cast<const int4*>(lists) + i) : make_int4(-1, -1, -1, -1);
  return make_int4(at < size ? lists[at] : -1, at + 1 < size ? lists[at + 1] : -1, at + 2 < size ? lists[at + 2] : -1,
                   at + 3 < size ? lists[at + 3] : -1);
}

// WORDS of 32 blocks each hold all; `memory` has WORDS words of bits, as many numbers of the bits before, and 32 more.
// A thread loads kLoads times four blocks before it looks at the first: the lists of six rows of 2,048 blocks at once.
template <int WORDS>
__device__ __forceinline__ void unite(
    const int32_t* candidates, const int32_t* row_seq, const int64_t* n_vis, int row, int rows, int listed, int bound,
    int32_t* blocks, int16_t* places, int32_t* lengths, int32_t* stops, int32_t* memory) {
  constexpr int kWords = WORDS / kThreads, kLoads = 6;
  uint32_t* bits = reinterpret_cast<uint32_t*>(memory);
  int32_t *before = memory + WORDS, *sums = memory + 2 * WORDS;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int run = find_run(row_seq, row);
  if ((row - run) % kGroup) {
    if (thread == 0) lengths[row] = 0, stops[row] = row;
    return;
  }
  bool is_other = lane >= kGroup || row + lane >= rows || row_seq[row + lane] != row_seq[row];
  int stop = row + __ffs(__ballot_sync(kAll, is_other)) - 1;
#pragma unroll
  for (int i = 0; i < kWords; ++i) bits[i * kThreads + thread] = 0;
  int32_t* ends = sums + 16;
  if (thread < stop - row) {
    int64_t seen = n_vis[row + thread];
    ends[thread] = (static_cast<int>(seen < bound ? seen : bound) + 7) / 8;
  }
  __syncthreads();
  const int32_t* lists = candidates + static_cast<int64_t>(row) * listed;
  int size = (stop - row) * listed;
  bool aligned = listed % 4 == 0;
  for (int base = thread; 4 * base < size; base += kThreads * kLoads) {
    int4 found[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) found[i] = load_four(lists, base + i * kThreads, size, aligned);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int at = 4 * (base + i * kThreads), first = at / listed;
      int four[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int block = four[e], r = aligned ? first : (at + e) / listed;
        if (block >= 0 && block < ends[r]) atomicOr(bits + (block >> 5), 1u << (block & 31));
      }
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
  for (int base = thread; 4 * base < size; base += kThreads * kLoads) {
    int4 found[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) found[i] = load_four(lists, base + i * kThreads, size, aligned);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int at = 4 * (base + i * kThreads), first = at / listed;
      int four[4] = {found[i].x, found[i].y, found[i].z, found[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int block = four[e], r = aligned ? first : (at + e) / listed;
        if (block >= 0 && block < ends[r]) {
          int u = before[block >> 5] + __popc(bits[block >> 5] & ((1u << (block & 31)) - 1));
          reinterpret_cast<int16_t*>(own_places + u)[r] = static_cast<int16_t>(at + e - r * listed);
        }
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
