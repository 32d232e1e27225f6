// The Hopper kernel: a row at a time on one multiprocessor, or on a pair of them, four warpgroups with a role each.
//
// Warpgroup 0 computes scores and weights of a tile of 64 keys, warpgroups 1 and 2 the weighted sum of half of the dims
// each, warpgroup 3 gathers and dequantises tiles ahead of them. Each role waits only for barriers in shared memory, so
// that decoding, scores, weights and sums of different tiles overlap.
//
// A pair (PARTS 2) is for few rows: each of the two has half of the dims of queries, keys and output, and they send each
// other their part of the scores. A score is the sum of two halves also where one multiprocessor has both, so bits agree.
//
// Shared memory: queries, stages of keys, both as panels of [64, 64] bfloat16 with the 128-byte swizzle, two stages of
// weights [64, 64], for a pair two of scores that came; then the small arrays of Small.
//
// The text in front of this file is INTRINSICS, GATHER and FINISH of `tilelang_source`, the PTX, the wgmma functions, and
// the sizes FREQUENCIES, HAS_ENTRIES, CAST_OUT and PARTS.

namespace shoal {

constexpr int PANEL = 8192, PANELS = 8 / PARTS, STAGES = 2 * PARTS, STAGE_BYTES = PANELS * PANEL, READY = 2 / PARTS;
constexpr int QUERY = 0, KEYS = PANELS * PANEL, WEIGHTS = KEYS + STAGES * STAGE_BYTES, CAME = WEIGHTS + 2 * PANEL;
constexpr int CAME_BYTES = 64 * 64 * 4, SMALL = CAME + (PARTS - 1) * 2 * CAME_BYTES;
// What is told of a tile beside its number of keys: the last of its row, of window records, beyond the last row.
constexpr int LAST = 1 << 8, NEAR = 1 << 9, END = 1 << 10;

struct Small {
  u64 k_ready[STAGES][READY], k_free[STAGES], p_ready[2], p_free[2], came[2];
  int tile[STAGES];
  float shrink[2][64], total[2][64];
};

// A place in a ring.
template <int SIZE>
struct Turn {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

// The compiler takes what comes from one lane as the same in all, and branches on it as not divergent.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Operands with the 128-byte swizzle: groups of 8 rows 1,024 bytes apart; `leading` bytes between panels of a
// transposed one.
__device__ __forceinline__ u64 operand(u32 address, u32 leading) {
  return (u64(1) << 62) | (u64(64) << 32) | (u64(leading >> 4) << 16) | (address >> 4 & 0x3FFF);
}

struct Lists {
  const unsigned char *window, *storage;
  const int *window_index, *table, *row_seq, *topk;
  int rows, near_width, far_width, blocks, per_block, units, offset, stride, first, step;
};

// The tiles of this multiprocessor's rows, one after another.
struct Cursor {
  int row, t, near, far, near_tiles, tiles, sequence, near_tail, far_tail, next_sequence;

  __device__ __forceinline__ void ask_next(const Lists& lists, int of) {
    near_tail = far_tail = -1;
    if (of < lists.rows) {
      near_tail = __ldg(lists.window_index + (int64_t)(of + 1) * lists.near_width - 1);
      if (HAS_ENTRIES) {
        far_tail = __ldg(lists.topk + (int64_t)(of + 1) * lists.far_width - 1);
        next_sequence = __ldg(lists.row_seq + of);
      }
    }
  }
  // Lists are usually full: their last entries tell, which were asked for a row before, as its sequence.
  __device__ __forceinline__ void open(const Lists& lists) {
    t = 0;
    if (row >= lists.rows) return;
    near = near_tail >= 0 ? lists.near_width
                          : shoal_count(lists.window_index + (int64_t)row * lists.near_width, lists.near_width);
    far = 0;
    sequence = next_sequence;
    if (HAS_ENTRIES)
      far = far_tail >= 0 ? lists.far_width
                          : shoal_count(lists.topk + (int64_t)row * lists.far_width, lists.far_width);
    near_tiles = (near + 63) >> 6;
    tiles = max(near_tiles + ((far + 63) >> 6), 1);  // an empty list has one tile of no keys
    ask_next(lists, row + lists.step);
  }
  __device__ __forceinline__ void next(const Lists& lists) {
    if (++t < tiles) return;
    row += lists.step;
    open(lists);
  }
};

// What is known of a tile before its bytes: where both keys of this thread are, -1 past the end of the list. That is the
// number of a window record, or of an entry (with the sequence in rest[0]), then its block and the place there.
struct Ahead {
  int at[2], rest[2], tile;

  __device__ __forceinline__ void ask_numbers(const Lists& lists, Cursor& cursor, int key) {
    at[0] = at[1] = -1;
    tile = END;
    if (cursor.row >= lists.rows) return;
    const bool is_near = cursor.t < cursor.near_tiles;
    const int first = (is_near ? cursor.t : cursor.t - cursor.near_tiles) * 64;
    const int count = (is_near ? cursor.near : cursor.far) - first;
    tile = max(min(count, 64), 0) | (cursor.t == cursor.tiles - 1 ? LAST : 0) | (is_near ? NEAR : 0);
    const int* list = is_near ? lists.window_index + (int64_t)cursor.row * lists.near_width
                              : lists.topk + (int64_t)cursor.row * lists.far_width;
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (key + g * 8 < count) at[g] = __ldg(list + first + key + g * 8);
    rest[0] = cursor.sequence;
    cursor.next(lists);
  }
  __device__ __forceinline__ void ask_blocks(const Lists& lists) {
    if (!HAS_ENTRIES || tile & (NEAR | END)) return;
    const int* table = lists.table + (int64_t)rest[0] * lists.blocks;
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (at[g] >= 0) {
        const int number = (u32)at[g] / (u32)lists.per_block;
        rest[g] = lists.offset + (at[g] - number * lists.per_block) * lists.stride;
        at[g] = __ldg(table + number);
      }
  }
  __device__ __forceinline__ void prefetch(const Lists& lists) const {
    const int quarter = (threadIdx.x & 31) >> 3;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const unsigned char* at_record = record(lists, g);
      // A record of 288 bytes lies in three or four lines, one of 528 in five.
      ask(at_record + (quarter < 3 ? quarter * 96 : 287));
      if (tile & NEAR && quarter) ask(at_record + 239 + quarter * 96);
    }
  }
  // Any valid address for a key that is not there.
  __device__ __forceinline__ const unsigned char* record(const Lists& lists, int g) const {
    if (at[g] < 0) return lists.window;
    if (!HAS_ENTRIES || tile & NEAR) return lists.window + (int64_t)at[g] * 528;
    return lists.storage + (int64_t)at[g] * lists.units + rest[g];
  }
};

// Chunks of 16 bytes in flight: of each of two keys chunks p * 4 + lane / 8. Half of a window record, and of an entry
// all that this multiprocessor needs: four chunks, in a pair two.
struct Unit {
  uint4 raw[8];
  u32 scales[8];
  const unsigned char* data[2];
  int to_scales, scale_step, part;
  bool is_short;

  __device__ __forceinline__ void aim(const Lists& lists, const Ahead& tile, int half) {
    const int quarter = (threadIdx.x & 31) >> 3, begin = tile.tile & NEAR ? (half + part) * 256 : part * 128;
#pragma unroll
    for (int g = 0; g < 2; ++g) data[g] = tile.record(lists, g) + quarter * 16 + begin;
    to_scales = (tile.tile & NEAR ? 512 + (half + part) * 8 : 256 + quarter * 2 + part * 16) - quarter * 16 - begin;
    scale_step = tile.tile & NEAR ? 2 : 8;
    is_short = PARTS == 2 && !(tile.tile & NEAR);
  }
  __device__ __forceinline__ void load(int p, int g) {
    if (p >= 2 && is_short) return;
    raw[p * 2 + g] = load16(data[g] + p * 64);
    scales[p * 2 + g] = load2(data[g] + (to_scales + p * scale_step));
  }
  // Dequantises chunk (p, g) and stores it; `places` are where the 8 dims i of chunk 0 of key 0 go, entries have four.
  template <bool NEAR>
  __device__ __forceinline__ void decode(int p, int g, const u32* places, const bool* exists) const {
    const uint4 v = raw[p * 2 + g];
    const u32 pair = scales[p * 2 + g];
    if (NEAR) {
      const u32 scale = pair >> ((threadIdx.x & 16) >> 1) & 0xFF;
      const u32 gain = exists[g] ? (scale ? scale << 7 : 0x40u) * 0x10001u : 0u;
      store16(places[0] + p * PANEL + g * 1024, octet(v.x, v.y, gain));
      store16(places[1] + p * PANEL + g * 1024, octet(v.z, v.w, gain));
    } else {
      // 2^120 makes the e4m3 scale of its placed bits, 2^116 serves the codes.
      const float unit = exists[g] ? 1.329227995784916e36f : 0.0f;
      const float low = __uint_as_float((pair & 0x7Fu) << 20) * unit * 8.307674973655724e34f;
      const float high = __uint_as_float((pair & 0x7F00u) << 12) * unit * 8.307674973655724e34f;
      const u32 first = pack2(low, low), second = pack2(high, high);
      store16(places[0] + p * 2 * PANEL + g * 1024, decode_fp4(v.x, first));
      store16(places[1] + p * 2 * PANEL + g * 1024, decode_fp4(v.y, first));
      store16(places[2] + p * 2 * PANEL + g * 1024, decode_fp4(v.z, second));
      store16(places[3] + p * 2 * PANEL + g * 1024, decode_fp4(v.w, second));
    }
  }
  // Chunks p of both keys, then the loads that take their place.
  template <bool NEAR, int P>
  __device__ __forceinline__ void step(const u32* places, const bool* exists) {
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (NEAR || P < 4 / PARTS) decode<NEAR>(P, g, places, exists);
#pragma unroll
    for (int g = 0; g < 2; ++g) load(P, g);
  }
  // The steps are cases of a switch that the compiler cannot see through: it would move all loads behind all decoding,
  // and their latency would not overlap with it.
  template <bool NEAR>
  __device__ __forceinline__ void steps(int from, int to, const u32* places, const bool* exists) {
#pragma unroll 1
    for (int p = from; p < to; ++p) {
      hide(p);
      if (p == 0)
        step<NEAR, 0>(places, exists);
      else if (p == 1)
        step<NEAR, 1>(places, exists);
      else if (p == 2)
        step<NEAR, 2>(places, exists);
      else
        step<NEAR, 3>(places, exists);
    }
  }
  static __device__ __forceinline__ uint4 octet(u32 a, u32 b, u32 gain) {
    uint4 d;
    d.x = decode_fp8(a, b, 0x4400u, gain);
    d.y = decode_fp8(a, b, 0x5511u, gain);
    d.z = decode_fp8(a, b, 0x6622u, gain);
    d.w = decode_fp8(a, b, 0x7733u, gain);
    return d;
  }
};

__device__ __forceinline__ void gather(const Lists& lists, int part, unsigned char* memory, Small& small) {
  const int thread = threadIdx.x & 127, quarter = (thread & 31) >> 3, key = (thread >> 5) * 16 + (thread & 7);
  const u32 keys = address_of(memory + KEYS) + key * 128;
  Cursor cursor;
  cursor.row = lists.first;
  cursor.ask_next(lists, cursor.row);
  cursor.open(lists);
  Ahead next, later, beyond;
  next.ask_numbers(lists, cursor, key);
  later.ask_numbers(lists, cursor, key);
  beyond.ask_numbers(lists, cursor, key);
  next.ask_blocks(lists);
  later.ask_blocks(lists);
  Ahead soon = later;
  later = beyond;
  later.ask_blocks(lists);
  beyond.ask_numbers(lists, cursor, key);
  Unit unit;
  unit.part = part;
  unit.aim(lists, next, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) unit.load(i >> 1, i & 1);
  Turn<STAGES> turn;
#pragma unroll 1
  while (!(next.tile & END)) {
    // Bytes of the next tile are asked for while this one is decoded, in the L2 cache a tile before that, blocks two and
    // numbers three.
    const int now = next.tile;
    const bool exists[2] = {next.at[0] >= 0, next.at[1] >= 0};
    if (PARTS == 1 && now & NEAR) unit.aim(lists, next, 1);
    next = soon;
    soon = later;
    soon.prefetch(lists);
    later = beyond;
    later.ask_blocks(lists);
    beyond.ask_numbers(lists, cursor, key);
    if (PARTS == 2 || !(now & NEAR)) unit.aim(lists, next, 0);
    const u32 tile = keys + turn.stage * STAGE_BYTES;
    wait(small.k_free[turn.stage], turn.parity ^ 1);
    if (thread == 0) small.tile[turn.stage] = now;
    u32 places[4];
    if (now & NEAR) {
#pragma unroll
      for (int i = 0; i < 2; ++i) places[i] = tile + (((quarter * 2 + i) ^ (key & 7)) << 4);
#pragma unroll 1
      for (int half = 0; half < READY; ++half) {
        if (half) {
          unit.aim(lists, next, 0);
          places[0] += 4 * PANEL;
          places[1] += 4 * PANEL;
        }
        unit.steps<true>(0, 4, places, exists);
        fence_async();
        arrive(small.k_ready[turn.stage][half]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        places[i] = tile + (quarter >> 1) * PANEL + ((((quarter & 1) * 4 + i) ^ (key & 7)) << 4);
#pragma unroll 1
      for (int half = 0; half < READY; ++half) {
        unit.steps<false>(half * 2, half * 2 + 2 * PARTS, places, exists);
        fence_async();
        arrive(small.k_ready[turn.stage][half]);
      }
    }
    turn.next();
  }
}

}  // namespace shoal
