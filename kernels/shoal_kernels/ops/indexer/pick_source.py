# mypy: ignore-errors
"""CUDA function that the TileLang kernel calls: the k best of one list of scores, for one block of 512 threads.

A list is read in octets of 8 scores (16 bytes) and kept in registers as bfloat16 pairs: what may not be chosen is NaN,
which no comparison counts, and a score that is NaN is -inf. The k-th largest score is found bit by bit, by counting how
many are at least a trial: integers, so their order does not matter. Places of the output come from prefix sums in the
order of the list.
"""

PICK = r"""
#include <cuda_bf16.h>
#include <stdint.h>

namespace shoal {

constexpr int kThreads = 512, kWarps = 16;
constexpr uint32_t kAll = 0xFFFFFFFFu, kNone = 0xFFFFFFFFu, kLowest = 0xFF80FF80u;

__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }

// A pair without NaN: those become -inf.
__device__ __forceinline__ uint32_t clean(uint32_t bits) { return bits_of(__hmax2(pair_of(bits), pair_of(kLowest))); }

// The score, twice, that has this place in the order of bfloat16 values.
__device__ __forceinline__ uint32_t score_at(uint32_t key) {
  return ((key & 0x8000u) ? key & 0x7FFFu : key ^ 0xFFFFu) * 0x00010001u;
}

__device__ __forceinline__ int scan_warp(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// OCTETS of a thread in one part of the list.
// SOURCE 0: coarse blocks, 1: candidate blocks, 2: entries of listed blocks, among the scores of all entries, 3: the
// same, with scores in the places of the list.
template <int SOURCE, int OCTETS>
struct Part {
  uint32_t pairs[OCTETS * 4];
  int32_t first[OCTETS];  // id of the first of 8

  __device__ __forceinline__ void load(
      const uint16_t* scores, const uint16_t* entries, const int32_t* blocks, int octets, int count, int visible,
      int part) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int end = SOURCE >= 2 ? visible : count;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      int octet = part * (kThreads * OCTETS) + (warp * OCTETS + j) * 32 + lane;
      first[j] = octet < octets ? (SOURCE >= 2 ? blocks[octet] : octet) * 8 : -8;
    }
    uint4 raw[OCTETS];
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      bool exists = first[j] >= 0 && first[j] < end;
      raw[j] = make_uint4(kNone, kNone, kNone, kNone);
      int octet = part * (kThreads * OCTETS) + (warp * OCTETS + j) * 32 + lane;
      // Scores in the list's order may be read before it is known which blocks these are.
      if (SOURCE == 3 ? octet < octets : exists)
        raw[j] = *reinterpret_cast<const uint4*>(scores + (SOURCE == 3 ? octet * 8 : first[j]));
    }
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      bool exists = first[j] >= 0 && first[j] < end;
      uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word = clean(words[i]);
        if (SOURCE == 1) word = bits_of(__hmin2(pair_of(word), pair_of(0x7F7F7F7Fu)));
        pairs[j * 4 + i] = exists ? word : kNone;
      }
      if (exists && first[j] + 8 >= end) {
        uint32_t last = 0x7F80u;
        if (SOURCE == 0) {
          // What the last block holds besides its visible entries must not count.
          __nv_bfloat162 most = pair_of(kLowest);
          for (int at = (count - 1) * 8; at < visible; ++at) most = __hmax2(most, pair_of(entries[at] * 0x00010001u));
          last = bits_of(most) & 0xFFFFu;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          uint32_t mask = 0xFFFFu << (16 * (e & 1));
          uint32_t& word = pairs[j * 4 + (e >> 1)];
          if (SOURCE < 2 && first[j] + e == end - 1) word = (word & ~mask) | ((last * 0x00010001u) & mask);
          if (first[j] + e >= end) word |= mask;
        }
      }
    }
  }

  // How many are at least (or above) a score that is given twice.
  template <bool ABOVE>
  __device__ __forceinline__ int count(uint32_t score) const {
    __nv_bfloat162 sum = pair_of(0u), limit = pair_of(score);
#pragma unroll
    for (int i = 0; i < OCTETS * 4; ++i)
      sum = __hadd2(sum, ABOVE ? __hgt2(pair_of(pairs[i]), limit) : __hge2(pair_of(pairs[i]), limit));
    return static_cast<int>(__low2float(sum) + __high2float(sum));
  }
};

// The sum over the block; `sums` alternates between two places, so one barrier is enough.
__device__ __forceinline__ int sum_block(int value, int32_t* sums, int warp, int lane) {
  value = __reduce_add_sync(kAll, value);
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  return __reduce_add_sync(kAll, lane < kWarps ? sums[lane] : 0);
}

template <int SOURCE, int OCTETS>
__device__ __forceinline__ void pick(
    const uint16_t* scores, const uint16_t* entries, const int32_t* blocks, int64_t n_vis, int bound, int listed, int k,
    int32_t* out, int32_t* sums) {
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int visible = static_cast<int>(n_vis < bound ? n_vis : bound);
  int count = (visible + 7) >> 3;
  int octets = SOURCE >= 2 ? listed : (count + 7) >> 3;
  constexpr int kOctets = kThreads * OCTETS;
  int parts = (octets + kOctets - 1) / kOctets;
  bool whole = parts <= 1;
  Part<SOURCE, OCTETS> part;
  part.load(scores, entries, blocks, octets, count, visible, 0);
  uint32_t key = 0;
  int turn = 0;
#pragma unroll 1
  for (uint32_t bit = 0x8000u; bit; bit >>= 1) {
    uint32_t trial = score_at(key | bit);
    int reached = part.template count<false>(trial);
    if (!whole)
      for (int p = 1; p < parts; ++p) {
        part.load(scores, entries, blocks, octets, count, visible, p);
        reached += part.template count<false>(trial);
      }
    if (!whole) part.load(scores, entries, blocks, octets, count, visible, 0);
    reached = sum_block(reached, sums + kWarps * (turn ^= 1), warp, lane);
    if (reached >= k) key |= bit;
    if (reached == k) break;
  }
  // No score has a key below that of -inf: there the trials count nothing, and all are needed or -inf is the k-th.
  uint32_t threshold = key < 0x007Fu ? kLowest : score_at(key);
  int num_above = part.template count<true>(threshold);
  if (!whole) {
    for (int p = 1; p < parts; ++p) {
      part.load(scores, entries, blocks, octets, count, visible, p);
      num_above += part.template count<true>(threshold);
    }
    part.load(scores, entries, blocks, octets, count, visible, 0);
  }
  int needed = k - sum_block(num_above, sums + kWarps * (turn ^= 1), warp, lane);
  int stored_above = 0, stored_equal = 0;
#pragma unroll 1
  for (int p = 0; p < parts; ++p) {
    if (p > 0) part.load(scores, entries, blocks, octets, count, visible, p);
    // Numbers above and at the threshold in one word: a part has fewer than 2^15 places.
    int packed[OCTETS], total = 0;
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      uint32_t above = 0, equal = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        above += __hgt2_mask(pair_of(part.pairs[j * 4 + i]), pair_of(threshold)) & 0x00010001u;
        equal += __heq2_mask(pair_of(part.pairs[j * 4 + i]), pair_of(threshold)) & 0x00010001u;
      }
      packed[j] = static_cast<int>((((above >> 16) + (above & 0xFFFFu)) << 16) + (equal >> 16) + (equal & 0xFFFFu));
      total += packed[j];
    }
    total = __reduce_add_sync(kAll, total);
    int32_t* own = sums + kWarps * (turn ^= 1);
    if (lane == 0) own[warp] = total;
    __syncthreads();
    int value = lane < kWarps ? own[lane] : 0;
    int all = __reduce_add_sync(kAll, value);
    int base = __reduce_add_sync(kAll, lane < warp ? value : 0);
#pragma unroll
    for (int j = 0; j < OCTETS; ++j) {
      int inclusive = scan_warp(packed[j], lane);
      int start = base + inclusive - packed[j];
      base += __shfl_sync(kAll, inclusive, 31);
      if (packed[j]) {
        int above = stored_above + (start >> 16), equal = stored_equal + (start & 0xFFFF);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t is_above = __hgt2_mask(pair_of(part.pairs[j * 4 + i]), pair_of(threshold));
          uint32_t is_equal = __heq2_mask(pair_of(part.pairs[j * 4 + i]), pair_of(threshold));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            bool wins = is_above & (half ? 0x10000u : 1u), ties = is_equal & (half ? 0x10000u : 1u);
            if (wins || (ties && equal < needed)) out[above + min(equal, needed)] = part.first[j] + 2 * i + half;
            above += wins;
            equal += ties;
          }
        }
      }
    }
    stored_above += all >> 16;
    stored_equal += all & 0xFFFF;
  }
  for (int at = stored_above + min(stored_equal, needed) + thread; at < k; at += kThreads) out[at] = -1;
}

}  // namespace shoal

#define SHOAL_PICK(SOURCE, OCTETS)                                                                                \
  extern "C" __device__ __forceinline__ void shoal_pick_##SOURCE##_##OCTETS(                                      \
      const void* scores, const void* entries, const void* blocks, int64_t n_vis, int bound, int listed, int k,   \
      void* out, void* sums) {                                                                                    \
    shoal::pick<SOURCE, OCTETS>(                                                                                  \
        static_cast<const uint16_t*>(scores), static_cast<const uint16_t*>(entries),                              \
        static_cast<const int32_t*>(blocks), n_vis, bound, listed, k, static_cast<int32_t*>(out),                 \
        static_cast<int32_t*>(sums));                                                                             \
  }
"""


def pick_source(source: int, octets: int) -> str:
    """CUDA source with the function `shoal_pick_{source}_{octets}`."""
    return f"{PICK}\nSHOAL_PICK({source}, {octets})\n"
