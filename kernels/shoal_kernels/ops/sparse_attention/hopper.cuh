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

// Head and chunk of 16 bytes of the queries that are the i-th of this thread, and their place in shared memory.
constexpr int QUERY_CHUNKS = 32 / PARTS;
__device__ __forceinline__ int2 query_chunk(int i) {
  const int thread = threadIdx.x & 127;
  return PARTS == 1 ? make_int2((i >> 1) * 4 + (thread >> 5), (i & 1) * 32 + (thread & 31))
                    : make_int2(i * 4 + (thread >> 5), thread & 31);
}
__device__ __forceinline__ u32 query_place(int i) {
  const int2 at = query_chunk(i);
  return QUERY + (at.y >> 3) * PANEL + at.x * 128 + (((at.y & 7) ^ (at.x & 7)) << 4);
}
__device__ __forceinline__ void ask_query(const unsigned char* query, unsigned char* memory) {
#pragma unroll 8
  for (int i = 0; i < QUERY_CHUNKS; ++i)
    copy16(address_of(memory + query_place(i)), query + query_chunk(i).x * 1024 + query_chunk(i).y * 16);
}
// Puts the dims of the queries that came in the order of the keys; each thread turns what it asked for.
__device__ __forceinline__ void turn_query(unsigned char* memory) {
  copies_done();
#pragma unroll 4
  for (int i = 0; i < QUERY_CHUNKS; ++i) {
    uint4* place = reinterpret_cast<uint4*>(memory + query_place(i));
    const uint4 v = *place;
    uint4 d;
    d.x = __byte_perm(v.x, v.z, 0x5410);
    d.y = __byte_perm(v.x, v.z, 0x7632);
    d.z = __byte_perm(v.y, v.w, 0x5410);
    d.w = __byte_perm(v.y, v.w, 0x7632);
    *place = d;
  }
  fence_async();
  warpgroup_sync();
}

// Scores and weights of the rows of a multiprocessor.
struct Scorer {
  unsigned char* memory;
  Small& small;
  const float factor;
  const int lane, head;
  const u64 q, k;
  const u32 weights;
  float peak[2], total[2];
  Turn<2> weight_turn;

  __device__ __forceinline__ Scorer(unsigned char* memory, Small& small, float factor)
      : memory(memory), small(small), factor(factor), lane(threadIdx.x & 31),
        head((threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2)), q(operand(address_of(memory + QUERY), 16)),
        k(operand(address_of(memory + KEYS), 16)),
        weights(address_of(memory + WEIGHTS) + ((threadIdx.x >> 5) * 16 + (threadIdx.x & 15)) * 128) {}

  // Over 256 dims from panel `first` on.
  __device__ __forceinline__ void multiply(float* s, int stage, int first) const {
    const u64 keys = k + stage * (STAGE_BYTES >> 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int place = (first + (i >> 2)) * (PANEL >> 4) + (i & 3) * 2;
      wgmma_scores(s, q + place, keys + place, i > 0);
    }
  }

  __device__ __forceinline__ void weigh(float* s, int tile) {
    const int keys = tile & 127, stage = weight_turn.stage;
    const bool is_last = tile & LAST;
    if (keys < 64) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if ((i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= keys) s[i] = __int_as_float(0xff800000);
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = s[half * 2];
#pragma unroll
      for (int i = 0; i < 16; ++i) most = fmaxf(most, s[(i >> 1) * 4 + half * 2 + (i & 1)]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float now = fmaxf(peak[half], most * factor);
      shrink[half] = shoal_exp2(peak[half] - now);
      peak[half] = now;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& x = s[(i >> 1) * 4 + half * 2 + (i & 1)];
        x = shoal_exp2(__fmaf_rn(x, factor, -now));
        sum[i & 1] += x;
      }
      total[half] = __fmaf_rn(total[half], shrink[half], sum[0] + sum[1]);
    }
    wait(small.p_free[stage], weight_turn.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_matrices(
          weights + stage * PANEL + (((j * 2 + (lane >> 4)) ^ (lane & 7)) << 4), pack2(s[j * 8], s[j * 8 + 1]),
          pack2(s[j * 8 + 2], s[j * 8 + 3]), pack2(s[j * 8 + 4], s[j * 8 + 5]), pack2(s[j * 8 + 6], s[j * 8 + 7]));
    if (is_last) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
      }
    }
    if ((lane & 3) == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        small.shrink[stage][head + half * 8] = shrink[half];
        if (is_last) small.total[stage][head + half * 8] = total[half];
      }
    }
    fence_async();
    arrive(small.p_ready[stage]);
    weight_turn.next();
  }

  // This multiprocessor's part of the scores to the other of the pair, and the other's part added.
  __device__ __forceinline__ u32 came(int slot) const {
    return address_of(memory + CAME) + slot * CAME_BYTES + threadIdx.x * 16;
  }
  __device__ __forceinline__ void send(const float* s, int slot, int part) const {
    const u32 to = in_block(came(slot), part ^ 1), barrier = in_block(address_of(&small.came[slot]), part ^ 1);
    if (threadIdx.x == 0) expect(small.came[slot], CAME_BYTES);
#pragma unroll
    for (int i = 0; i < 8; ++i) send16(to + i * 2048, s + i * 4, barrier);
  }
  __device__ __forceinline__ void add_other(float* s, int slot, u32 parity) const {
    wait(small.came[slot], parity);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 other = *reinterpret_cast<const float4*>(memory + CAME + slot * CAME_BYTES + threadIdx.x * 16 + i * 2048);
      s[i * 4 + 0] += other.x;
      s[i * 4 + 1] += other.y;
      s[i * 4 + 2] += other.z;
      s[i * 4 + 3] += other.w;
    }
  }
};

__device__ __forceinline__ void score(
    const unsigned char* query, const float* sink, float factor, int rows, int first, int step, int part,
    unsigned char* memory, Small& small) {
  Scorer scorer(memory, small, factor);
  Turn<STAGES> turn;
  Turn<2> came;
  if (first < rows) ask_query(query + (int64_t)first * 65536, memory);
#pragma unroll 1
  for (int row = first; row < rows; row += step) {
    turn_query(memory);
    const unsigned char* next_query = query + (int64_t)(row + step) * 65536;
    const bool is_more = row + step < rows;
    if (is_more) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ask(next_query + (i * 128 + threadIdx.x) * 128);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = sink[scorer.head + i * 8] * 1.4426950408889634f;
      scorer.peak[i] = fmaxf(mine, -1e30f);
      // A thread has the sum of its own keys; one of the four adds the sink.
      scorer.total[i] = scorer.lane & 3 ? 0.0f : shoal_exp2(mine - scorer.peak[i]);
    }
    int tile;
    if (PARTS == 1) {
#pragma unroll 1
      do {
        float s[32], right[32];
        wait(small.k_ready[turn.stage][0], turn.parity);
        tile = uniform(small.tile[turn.stage]);
        wgmma_fence();
        scorer.multiply(s, turn.stage, 0);
        wait(small.k_ready[turn.stage][READY - 1], turn.parity);
        scorer.multiply(right, turn.stage, 4);
        wgmma_done();
        turn.next();
        if (tile & LAST && is_more) {
          warpgroup_sync();
          ask_query(next_query, memory);
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] += right[i];
        scorer.weigh(s, tile);
      } while (!(tile & LAST));
    } else {
      // Products of the next tile run while the other's part of this one is on its way and while it is weighed.
      float mine[32];
      wait(small.k_ready[turn.stage][0], turn.parity);
      int next_tile = uniform(small.tile[turn.stage]);
      wgmma_fence();
      scorer.multiply(mine, turn.stage, 0);
      wgmma_done();
      turn.next();
      scorer.send(mine, came.stage, part);
#pragma unroll 1
      do {
        float s[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = mine[i];
        tile = next_tile;
        if (!(tile & LAST)) {
          wait(small.k_ready[turn.stage][0], turn.parity);
          next_tile = uniform(small.tile[turn.stage]);
          wgmma_fence();
          scorer.multiply(mine, turn.stage, 0);
          wgmma_commit();
          turn.next();
        } else if (is_more) {
          warpgroup_sync();
          ask_query(next_query, memory);
        }
        scorer.add_other(s, came.stage, came.parity);
        came.next();
        scorer.weigh(s, tile);
        wgmma_done();
        if (!(tile & LAST)) scorer.send(mine, came.stage, part);
      } while (!(tile & LAST));
    }
  }
}

__device__ __forceinline__ void add(
    int half, const int64_t* positions, const float* cos_sin, __nv_bfloat16* out, int rows, int first_row, int step,
    int part, unsigned char* memory, Small& small) {
  constexpr int COLUMNS = 256 / PARTS, COUNT = COLUMNS / 2;
  const int lane = threadIdx.x & 31, head = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
  const u64 p = operand(address_of(memory + WEIGHTS), 16);
  const u64 v = operand(address_of(memory + KEYS + half * (PANELS / 2) * PANEL), PANEL);
  Turn<STAGES> turn;
  Turn<2> weight_turn;
#pragma unroll 1
  for (int row = first_row; row < rows; row += step) {
    float acc[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) acc[i] = 0.0f;
    float inverse[2];
    bool is_last;
#pragma unroll 1
    do {
      const int stage = weight_turn.stage;
      wait(small.k_ready[turn.stage][half * (READY - 1)], turn.parity);
      wait(small.p_ready[stage], weight_turn.parity);
      is_last = uniform(small.tile[turn.stage]) & LAST;
      const float first = small.shrink[stage][head], second = small.shrink[stage][head + 8];
      if (is_last) {
        // Keys were held times 2^-10.
        inverse[0] = __fdividef(1024.0f, small.total[stage][head]);
        inverse[1] = __fdividef(1024.0f, small.total[stage][head + 8]);
      }
      // Leaving out a product with one changes no bit.
      if (__any_sync(0xffffffffu, first != 1.0f || second != 1.0f)) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
          acc[i] *= first;
          acc[i + 1] *= first;
          acc[i + 2] *= second;
          acc[i + 3] *= second;
        }
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 128; ++j)
          wgmma_sum(acc + j * 64, p + stage * (PANEL >> 4) + i * 2,
                    v + turn.stage * (STAGE_BYTES >> 4) + i * 128 + j * (2 * PANEL >> 4));
      }
      wgmma_done();
      arrive(small.k_free[turn.stage]);
      arrive(small.p_free[stage]);
      turn.next();
      weight_turn.next();
    } while (!is_last);
    shoal_finish_as<CAST_OUT, FREQUENCIES, COLUMNS>(
        acc, inverse, cos_sin + positions[row] * (2 * FREQUENCIES), out + (int64_t)row * 32768,
        part * 256 + half * COLUMNS);
  }
}

}  // namespace shoal

__device__ __forceinline__ void shoal_attend(
    const void* query, const void* window, const int* window_index, const float* sink, const void* positions,
    const float* cos_sin, const void* storage, const int* block_table, const int* row_seq, const int* topk, void* out,
    float factor, int rows, int near_width, int far_width, int blocks, int units, int per_block, int offset, int stride,
    void* memory_bytes) {
  using namespace shoal;
  unsigned char* memory = reinterpret_cast<unsigned char*>(memory_bytes);
  Small& small = *reinterpret_cast<Small*>(memory + SMALL);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      for (int j = 0; j < READY; ++j) init(small.k_ready[i][j], 4);
      init(small.k_free[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      init(small.p_ready[i], 4);
      init(small.p_free[i], 8);
      init(small.came[i], 1);
    }
    barriers_made();
  }
  if (PARTS == 1) __syncthreads(); else cluster_sync();
  const int role = threadIdx.x >> 7, part = blockIdx.x % PARTS, first = blockIdx.x / PARTS, step = gridDim.x / PARTS;
  if (role == 3) {
    if (PARTS == 1) fewer_registers<96>();
    const Lists lists = {reinterpret_cast<const unsigned char*>(window), reinterpret_cast<const unsigned char*>(storage),
                         window_index, block_table, row_seq, topk, rows, near_width, far_width, blocks, per_block,
                         units, offset, stride, first, step};
    gather(lists, part, memory, small);
  } else if (role == 0) {
    if (PARTS == 1) fewer_registers<96>();
    score(reinterpret_cast<const unsigned char*>(query) + part * 512, sink, factor, rows, first, step, part, memory,
          small);
  } else {
    if (PARTS == 1) more_registers<160>();
    add(role - 1, reinterpret_cast<const int64_t*>(positions), cos_sin, reinterpret_cast<__nv_bfloat16*>(out), rows,
        first, step, part, memory, small);
  }
  // The other of a pair may still send.
  if (PARTS == 2) cluster_sync();
}
