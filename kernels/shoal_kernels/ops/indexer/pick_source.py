# mypy: ignore-errors
"""CUDA function that the TileLang kernel calls: the k best of one list of scores, for one block of 512 threads.

A list is read in octets of 8 scores (16 bytes). Keys are counted by their high 11 bits, then those of the bin that
holds the k-th largest by their low 5: integer counts in shared memory, so their order does not matter. Places of the
output come from prefix sums in the order of the list.
"""

PICK = r"""
#include <stdint.h>

namespace shoal {

constexpr int kThreads = 512, kWarps = 16, kBins = 2048;

// Key of a bfloat16 score: orders as an unsigned integer; NaN as -inf, -0 as +0; never 0.
__device__ __forceinline__ uint32_t sort_key(uint32_t bits) {
  if ((bits & 0x7FFFu) > 0x7F80u) bits = 0xFF80u;
  if (bits == 0x8000u) bits = 0u;
  return bits ^ ((bits & 0x8000u) ? 0xFFFFu : 0x8000u);
}

__device__ __forceinline__ int scan_warp(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// OCTETS of a thread in one part of the list.
// SOURCE 0: coarse blocks, 1: candidate blocks, 2: entries of listed blocks.
template <int SOURCE, int OCTETS>
struct Part {
  uint32_t keys[OCTETS * 4];  // two each
  int32_t first[OCTETS];      // id of the first of 8, or -1

  __device__ __forceinline__ void load(
      const int16_t* scores, const int16_t* entries, const int32_t* blocks, int octets, int count, int visible,
      int part) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint4 raw[OCTETS];
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      int octet = part * (kThreads * OCTETS) + (warp * OCTETS + j) * 32 + lane;
      first[j] = -1;
      if (octet < octets) first[j] = SOURCE == 2 ? blocks[octet] * 8 : octet * 8;
    }
    int end = SOURCE == 2 ? visible : count;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      raw[j] = make_uint4(0, 0, 0, 0);
      if (first[j] >= end) first[j] = -1;
      if (first[j] >= 0) raw[j] = *reinterpret_cast<const uint4*>(scores + first[j]);
    }
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int id = first[j] + e;
        uint32_t key = sort_key((words[e >> 1] >> (16 * (e & 1))) & 0xFFFFu);
        if (SOURCE == 1) key = min(key, 0xFF7Fu);
        if (SOURCE < 2 && id == count - 1 && first[j] >= 0) {
          key = 0xFFFFu;
          if (SOURCE == 0) {
            // What the block holds besides its visible entries must not count.
            key = 0u;
            for (int at = id * 8; at < visible; ++at)
              key = max(key, sort_key(static_cast<uint32_t>(static_cast<uint16_t>(entries[at]))));
          }
        }
        if (first[j] < 0 || id >= end) key = 0u;
        if (e & 1) keys[j * 4 + (e >> 1)] |= key << 16;
        else keys[j * 4 + (e >> 1)] = key;
      }
    }
  }

  __device__ __forceinline__ uint32_t key(int j, int e) const {
    return (keys[j * 4 + (e >> 1)] >> (16 * (e & 1))) & 0xFFFFu;
  }
};

template <int SOURCE, int OCTETS>
__device__ __forceinline__ void pick(
    const int16_t* scores, const int16_t* entries, const int32_t* blocks, int64_t n_vis, int bound, int listed, int k,
    int32_t* out, int32_t* shared) {
  int32_t *bins = shared, *fine = bins + kBins, *sums = fine + 32, *found = sums + kWarps;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int visible = static_cast<int>(n_vis < bound ? n_vis : bound);
  int count = (visible + 7) >> 3;
  int octets = SOURCE == 2 ? listed : (count + 7) >> 3;
  constexpr int kOctets = kThreads * OCTETS;
  int parts = (octets + kOctets - 1) / kOctets;
  bool whole = parts <= 1;
  Part<SOURCE, OCTETS> part;
  part.load(scores, entries, blocks, octets, count, visible, 0);
#pragma unroll
  for (int i = 0; i < kBins / kThreads; ++i) bins[i * kThreads + thread] = 0;
  if (thread < 32) fine[thread] = 0;
  if (thread < 4) found[thread] = thread == 0 ? -1 : 0;
  __syncthreads();
  for (int p = 0; p < parts; ++p) {
    if (!whole) part.load(scores, entries, blocks, octets, count, visible, p);
#pragma unroll
    for (int j = 0; j < OCTETS; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        uint32_t key = part.key(j, e);
        if (key) atomicAdd(&bins[key >> 5], 1);
      }
  }
  __syncthreads();
  // Counts from the highest bin down: thread t has bins 2047 - 4 t and the three below.
  int4 four = reinterpret_cast<int4*>(bins)[kThreads - 1 - thread];
  int own = four.x + four.y + four.z + four.w;
  int before = scan_warp(own, lane);
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  before -= own;
  for (int w = 0; w < warp; ++w) before += sums[w];
  int counts[4] = {four.w, four.z, four.y, four.x};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < k && before + counts[i] >= k) found[0] = kBins - 1 - 4 * thread - i, found[1] = before;
    before += counts[i];
  }
  __syncthreads();
  int bin = found[0], above = found[1];
  uint32_t threshold = 0;
  int needed = 0;
  if (bin >= 0) {
    for (int p = 0; p < parts; ++p) {
      if (!whole) part.load(scores, entries, blocks, octets, count, visible, p);
#pragma unroll
      for (int j = 0; j < OCTETS; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          uint32_t key = part.key(j, e);
          if (key && static_cast<int>(key >> 5) == bin) atomicAdd(&fine[key & 31], 1);
        }
    }
    __syncthreads();
    if (warp == 0) {
      int own_fine = fine[31 - lane];
      int before_fine = above + scan_warp(own_fine, lane) - own_fine;
      if (before_fine < k && before_fine + own_fine >= k)
        found[2] = (bin << 5) | (31 - lane), found[3] = k - before_fine;
    }
    __syncthreads();
    threshold = found[2], needed = found[3];
  }
  int stored_above = 0, stored_equal = 0;
  for (int p = 0; p < parts; ++p) {
    if (!whole) part.load(scores, entries, blocks, octets, count, visible, p);
    // Numbers above and at the threshold in one word: a part has fewer than 2^15 places.
    int packed[OCTETS], total = 0;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      packed[j] = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        uint32_t key = part.key(j, e);
        packed[j] += key > threshold ? 65536 : (key == threshold && key) ? 1 : 0;
      }
      total += packed[j];
    }
    total = __reduce_add_sync(0xFFFFFFFFu, total);
    __syncthreads();
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    int base = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      int value = sums[w];
      base += w < warp ? value : 0;
      all += value;
    }
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      int inclusive = scan_warp(packed[j], lane);
      int start = base + inclusive - packed[j];
      base += __shfl_sync(0xFFFFFFFFu, inclusive, 31);
      if (packed[j]) {
        int num_above = stored_above + (start >> 16), num_equal = stored_equal + (start & 0xFFFF);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          uint32_t key = part.key(j, e);
          bool is_above = key > threshold, is_equal = key == threshold && key;
          if (is_above || (is_equal && num_equal < needed)) out[num_above + min(num_equal, needed)] = part.first[j] + e;
          num_above += is_above;
          num_equal += is_equal;
        }
      }
    }
    stored_above += all >> 16;
    stored_equal += all & 0xFFFF;
  }
  for (int at = stored_above + min(stored_equal, needed) + thread; at < k; at += kThreads) out[at] = -1;
}

}  // namespace shoal

#define SHOAL_PICK(SOURCE, OCTETS)                                                                                  \
  extern "C" __device__ __forceinline__ void shoal_pick_##SOURCE##_##OCTETS(                                        \
      const void* scores, const void* entries, const void* blocks, int64_t n_vis, int bound, int listed, int k,     \
      void* out, void* shared) {                                                                                    \
    shoal::pick<SOURCE, OCTETS>(                                                                                    \
        static_cast<const int16_t*>(scores), static_cast<const int16_t*>(entries),                                  \
        static_cast<const int32_t*>(blocks), n_vis, bound, listed, k, static_cast<int32_t*>(out),                   \
        static_cast<int32_t*>(shared));                                                                             \
  }
"""


def pick_source(source: int, octets: int) -> str:
    """CUDA source with the function `shoal_pick_{source}_{octets}`."""
    return f"{PICK}\nSHOAL_PICK({source}, {octets})\n"
