// The Hopper kernel: a row at a time on one multiprocessor, or on a pair of them, two pairs of warpgroups.
//
// Warpgroups 0 and 1 compute scores and weights of 32 keys each of a tile of 64, exchange what they need of them in shared
// memory and add half of the dims each. Warpgroups 2 and 3 gather and dequantise 32 keys each of the tiles ahead.
//
// A pair of multiprocessors (PARTS 2) is for few rows: each of the two has half of the dims of queries, keys and output,
// and they send each other their part of the scores. A score is the sum of two halves also where one multiprocessor has
// both, so bits agree.
//
// Shared memory: queries, stages of keys, both as panels of [64, 64] bfloat16 with the 128-byte swizzle, weights
// [64, 64], one half of the scores, for a pair two stages of it; then the small arrays of Small.
//
// The text in front of this file is INTRINSICS, GATHER and FINISH of `tilelang_source`, the PTX, the wgmma functions, and
// the sizes FREQUENCIES, HAS_ENTRIES, CAST_OUT and PARTS.

namespace shoal {

constexpr int PANEL = 8192, PANELS = 8 / PARTS, STAGES = 2 * PARTS, STAGE_BYTES = PANELS * PANEL, READY = 2 / PARTS;
constexpr int QUERY = 0, KEYS = PANELS * PANEL, WEIGHTS = KEYS + STAGES * STAGE_BYTES, CAME = WEIGHTS + PANEL;
constexpr int CAME_BYTES = 64 * 64 * 4, SMALL = CAME + PARTS * CAME_BYTES;
// What is told of a tile beside its number of keys: the last of its row, of window records, beyond the last row.
constexpr int LAST = 1 << 8, NEAR = 1 << 9, END = 1 << 10;

struct Small {
  u64 k_ready[STAGES][READY], k_free[STAGES], came[2][2];
  int tile[STAGES];
  float most[2][64], total[2][64];
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

// What is known of a tile before its bytes: where the key of this thread is, -1 past the end of the list. That is the
// number of a window record, or of an entry (with the sequence in rest), then its block and the place there.
struct Ahead {
  int at, rest, tile;

  __device__ __forceinline__ void ask_number(const Lists& lists, Cursor& cursor, int key) {
    at = -1;
    tile = END;
    if (cursor.row >= lists.rows) return;
    const bool is_near = cursor.t < cursor.near_tiles;
    const int first = (is_near ? cursor.t : cursor.t - cursor.near_tiles) * 64;
    const int count = (is_near ? cursor.near : cursor.far) - first;
    tile = max(min(count, 64), 0) | (cursor.t == cursor.tiles - 1 ? LAST : 0) | (is_near ? NEAR : 0);
    const int* list = is_near ? lists.window_index + (int64_t)cursor.row * lists.near_width
                              : lists.topk + (int64_t)cursor.row * lists.far_width;
    if (key < count) at = __ldg(list + first + key);
    rest = cursor.sequence;
    cursor.next(lists);
  }
  __device__ __forceinline__ void ask_block(const Lists& lists) {
    if (!HAS_ENTRIES || tile & (NEAR | END) || at < 0) return;
    const int number = (u32)at / (u32)lists.per_block;
    const int* table = lists.table + (int64_t)rest * lists.blocks;
    rest = lists.offset + (at - number * lists.per_block) * lists.stride;
    at = __ldg(table + number);
  }
  // Any valid address for a key that is not there.
  __device__ __forceinline__ const unsigned char* record(const Lists& lists) const {
    if (at < 0) return lists.window;
    if (!HAS_ENTRIES || tile & NEAR) return lists.window + (int64_t)at * 528;
    return lists.storage + (int64_t)at * lists.units + rest;
  }
};

// Chunks of 16 bytes of the key of this thread: chunks p * 4 + lane / 8. Half of a window record, and of an entry all that
// this multiprocessor needs: four chunks, in a pair two.
struct Unit {
  uint4 raw[4];
  u32 scales[4];

  __device__ __forceinline__ void load(const Lists& lists, const Ahead& tile, int half) {
    const int quarter = (threadIdx.x & 31) >> 3;
    const unsigned char* record = tile.record(lists) + quarter * 16;
    const bool is_near = tile.tile & NEAR;
    const unsigned char* data = record + (is_near ? half * 256 : PARTS == 2 ? half * 128 : 0);
    const unsigned char* scale = record + (is_near ? 512 + half * 8 - quarter * 16
                                                   : 256 - quarter * 14 + (PARTS == 2 ? half * 16 : 0));
    const int step = is_near ? 2 : 8;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (PARTS == 2 && p >= 2 && !is_near) break;
      raw[p] = load16(data + p * 64);
      scales[p] = load2(scale + p * step);
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
  // Dequantises chunk p and stores it; `places` are where the 8 dims i of chunk 0 go.
  __device__ __forceinline__ void put_window(int p, const u32* places, bool exists) const {
    const u32 scale = scales[p] >> ((threadIdx.x & 16) >> 1) & 0xFF;
    const u32 gain = exists ? (scale ? scale << 7 : 0x40u) * 0x10001u : 0u;
    store16(places[0] + p * PANEL, octet(raw[p].x, raw[p].y, gain));
    store16(places[1] + p * PANEL, octet(raw[p].z, raw[p].w, gain));
  }
  __device__ __forceinline__ void put_entry(int p, const u32* places, float unit) const {
    // 2^120 (in unit) makes the e4m3 scale of its placed bits, 2^116 serves the codes.
    const float low = __uint_as_float((scales[p] & 0x7Fu) << 20) * unit * 8.307674973655724e34f;
    const float high = __uint_as_float((scales[p] & 0x7F00u) << 12) * unit * 8.307674973655724e34f;
    const u32 first = pack2(low, low), second = pack2(high, high);
    store16(places[0] + p * 2 * PANEL, decode_fp4(raw[p].x, first));
    store16(places[1] + p * 2 * PANEL, decode_fp4(raw[p].y, first));
    store16(places[2] + p * 2 * PANEL, decode_fp4(raw[p].z, second));
    store16(places[3] + p * 2 * PANEL, decode_fp4(raw[p].w, second));
  }
};

__device__ __forceinline__ void gather(const Lists& lists, int part, unsigned char* memory, Small& small) {
  const int thread = threadIdx.x & 255, quarter = (thread & 31) >> 3, key = (thread >> 5) * 8 + (thread & 7);
  const u32 keys = address_of(memory + KEYS) + key * 128;
  Cursor cursor;
  cursor.row = lists.first;
  cursor.ask_next(lists, cursor.row);
  cursor.open(lists);
  Ahead next, later, beyond;
  next.ask_number(lists, cursor, key);
  later.ask_number(lists, cursor, key);
  beyond.ask_number(lists, cursor, key);
  next.ask_block(lists);
  later.ask_block(lists);
  Unit unit;
  unit.load(lists, next, part);
  Turn<STAGES> turn;
#pragma unroll 1
  while (!(next.tile & END)) {
    // Bytes of the next tile are asked for before this one is decoded, blocks a tile and numbers two tiles before that.
    const int now = next.tile;
    const bool exists = next.at >= 0;
    Unit coming;
    if (PARTS == 1 && now & NEAR) coming.load(lists, next, 1);
    next = later;
    if (PARTS == 2 || !(now & NEAR)) coming.load(lists, next, part);
    later = beyond;
    later.ask_block(lists);
    beyond.ask_number(lists, cursor, key);
    const u32 tile = keys + turn.stage * STAGE_BYTES;
    wait(small.k_free[turn.stage], turn.parity ^ 1);
    if (thread == 0) small.tile[turn.stage] = now;
    u32 places[4];
    if (now & NEAR) {
#pragma unroll
      for (int i = 0; i < 2; ++i) places[i] = tile + (((quarter * 2 + i) ^ (key & 7)) << 4);
#pragma unroll 1
      for (int half = 0; half < READY; ++half) {
#pragma unroll
        for (int p = 0; p < 4; ++p) unit.put_window(p, places, exists);
        fence_async();
        arrive(small.k_ready[turn.stage][half]);
        unit = coming;
        if (half < READY - 1) {
          coming.load(lists, next, part);
          places[0] += 4 * PANEL;
          places[1] += 4 * PANEL;
        }
      }
    } else {
      const float there = exists ? 1.329227995784916e36f : 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        places[i] = tile + (quarter >> 1) * PANEL + ((((quarter & 1) * 4 + i) ^ (key & 7)) << 4);
#pragma unroll
      for (int p = 0; p < 4 / PARTS; ++p) {
        unit.put_entry(p, places, there);
        if (p & 1) {
          fence_async();
          arrive(small.k_ready[turn.stage][p >> 1]);
        }
      }
      unit = coming;
    }
    turn.next();
  }
}

// Head and chunk of 16 bytes of the queries that are the i-th of this thread, and their place in shared memory.
constexpr int QUERY_CHUNKS = 16 / PARTS;
__device__ __forceinline__ int2 query_chunk(int i) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  return PARTS == 1 ? make_int2((i >> 1) * 8 + warp, (i & 1) * 32 + lane) : make_int2(i * 8 + warp, lane);
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
  consumers_sync();
}

// Everything from scores to output: scores and weights of 32 keys of every tile, the sum over half of the dims.
struct Consumer {
  static constexpr int COLUMNS = 256 / PARTS, COUNT = COLUMNS / 2;
  unsigned char* memory;
  Small& small;
  const int group, lane, head;
  float peak[2], total[2];
  Turn<STAGES> turn;
  Turn<2> came_turn;

  __device__ __forceinline__ Consumer(unsigned char* memory, Small& small)
      : memory(memory), small(small), group(uniform(threadIdx.x >> 7)), lane(threadIdx.x & 31),
        head((threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2)) {}

  // Over 256 dims from panel `first` on.
  __device__ __forceinline__ void multiply(float* s, int first) const {
    const u64 q = operand(address_of(memory + QUERY), 16);
    const u64 k = operand(address_of(memory + KEYS) + turn.stage * STAGE_BYTES + group * 4096, 16);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int place = (first + (i >> 2)) * (PANEL >> 4) + (i & 3) * 2;
      wgmma_scores(s, q + place, k + place, i > 0);
    }
  }

  __device__ __forceinline__ float4* half_scores(int slot, int i) const {
    return reinterpret_cast<float4*>(memory + CAME + slot * CAME_BYTES + threadIdx.x * 16 + i * 4096);
  }

  // The scores of the tile whose turn it is, and what is told of it.
  __device__ __forceinline__ int score(float* s, int part) {
    wait(small.k_ready[turn.stage][0], turn.parity);
    const int tile = uniform(small.tile[turn.stage]);
    wgmma_fence();
    multiply(s, 0);
    wgmma_done();
    const int slot = came_turn.stage;
    if (PARTS == 1) {
      // Registers do not hold both halves beside the sum of values: the first waits in shared memory.
#pragma unroll
      for (int i = 0; i < 4; ++i) *half_scores(0, i) = make_float4(s[i * 4], s[i * 4 + 1], s[i * 4 + 2], s[i * 4 + 3]);
      wait(small.k_ready[turn.stage][READY - 1], turn.parity);
      wgmma_fence();
      multiply(s, 4);
      wgmma_done();
    } else {
      const u32 barrier = in_block(address_of(&small.came[slot][group]), part ^ 1);
      if ((threadIdx.x & 127) == 0) expect(small.came[slot][group], CAME_BYTES / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) send16(in_block(address_of(half_scores(slot, i)), part ^ 1), s + i * 4, barrier);
      wait(small.came[slot][group], came_turn.parity);
      came_turn.next();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 other = *half_scores(slot, i);
      s[i * 4 + 0] += other.x;
      s[i * 4 + 1] += other.y;
      s[i * 4 + 2] += other.z;
      s[i * 4 + 3] += other.w;
    }
    return tile;
  }

  // Weights of the tile into shared memory, and what the sum so far shrinks by.
  __device__ __forceinline__ void weigh(float* s, float* shrink, int tile, float factor) {
    const int keys = (tile & 127) - group * 32;
    if (keys < 32) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if ((i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= keys) s[i] = __int_as_float(0xff800000);
    }
    float most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = s[half * 2];
#pragma unroll
      for (int i = 0; i < 8; ++i) most[half] = fmaxf(most[half], s[(i >> 1) * 4 + half * 2 + (i & 1)]);
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2));
      if ((lane & 3) == 0) small.most[group][head + half * 8] = most[half];
    }
    consumers_sync();  // also: the sum before is done, which read the weights
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = fmaxf(peak[half], fmaxf(most[half], small.most[group ^ 1][head + half * 8]) * factor);
      shrink[half] = shoal_exp2(peak[half] - now);
      peak[half] = now;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = s[(i >> 1) * 4 + half * 2 + (i & 1)];
        x = shoal_exp2(__fmaf_rn(x, factor, -now));
        sum[i & 1] += x;
      }
      total[half] = __fmaf_rn(total[half], shrink[half], sum[0] + sum[1]);
    }
    const u32 row = address_of(memory + WEIGHTS) + ((threadIdx.x >> 5 & 3) * 16 + (lane & 15)) * 128;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      store_matrices(
          row + (((group * 4 + j * 2 + (lane >> 4)) ^ (lane & 7)) << 4), pack2(s[j * 8], s[j * 8 + 1]),
          pack2(s[j * 8 + 2], s[j * 8 + 3]), pack2(s[j * 8 + 4], s[j * 8 + 5]), pack2(s[j * 8 + 6], s[j * 8 + 7]));
    fence_async();
  }

  __device__ __forceinline__ void add(float* acc, const float* shrink) const {
    // Leaving out a product with one changes no bit.
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        acc[i] *= shrink[0];
        acc[i + 1] *= shrink[0];
        acc[i + 2] *= shrink[1];
        acc[i + 3] *= shrink[1];
      }
    }
    const u64 p = operand(address_of(memory + WEIGHTS), 16);
    const u64 v = operand(
        address_of(memory + KEYS) + turn.stage * STAGE_BYTES + group * (PANELS / 2) * PANEL, PANEL);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 128; ++j)
        wgmma_sum(acc + j * 64, p + i * 2, v + i * 128 + j * (2 * PANEL >> 4));
    }
    wgmma_done();
  }
};

__device__ __forceinline__ void consume(
    const unsigned char* query, const float* sink, const int64_t* positions, const float* cos_sin, __nv_bfloat16* out,
    float factor, int rows, int first, int step, int part, unsigned char* memory, Small& small) {
  Consumer one(memory, small);
  if (first < rows) ask_query(query + (int64_t)first * 65536, memory);
#pragma unroll 1
  for (int row = first; row < rows; row += step) {
    turn_query(memory);
    const unsigned char* next_query = query + (int64_t)(row + step) * 65536;
    const bool is_more = row + step < rows;
    if (is_more) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ask(next_query + (i * 256 + threadIdx.x) * 128);
    }
    float acc[Consumer::COUNT];
#pragma unroll
    for (int i = 0; i < Consumer::COUNT; ++i) acc[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = sink[one.head + i * 8] * 1.4426950408889634f;
      one.peak[i] = fmaxf(mine, -1e30f);
      // A thread has the sum of its own keys; one of the eight of a head adds the sink.
      one.total[i] = one.lane & 3 || one.group ? 0.0f : shoal_exp2(mine - one.peak[i]);
    }
    int tile;
#pragma unroll 1
    do {
      float s[16], shrink[2];
      tile = one.score(s, part);
      one.weigh(s, shrink, tile, factor);
      consumers_sync();
      // Both have their scores: the queries are free.
      if (tile & LAST && is_more) ask_query(next_query, memory);
      one.add(acc, shrink);
      arrive(small.k_free[one.turn.stage]);
      one.turn.next();
    } while (!(tile & LAST));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      one.total[half] += __shfl_xor_sync(0xffffffffu, one.total[half], 1);
      one.total[half] += __shfl_xor_sync(0xffffffffu, one.total[half], 2);
      if ((one.lane & 3) == 0) small.total[one.group][one.head + half * 8] = one.total[half];
    }
    consumers_sync();
    float inverse[2];  // keys were held times 2^-10
#pragma unroll
    for (int half = 0; half < 2; ++half)
      inverse[half] = __fdividef(1024.0f, small.total[0][one.head + half * 8] + small.total[1][one.head + half * 8]);
    shoal_finish_as<CAST_OUT, FREQUENCIES, Consumer::COLUMNS>(
        acc, inverse, cos_sin + positions[row] * (2 * FREQUENCIES), out + (int64_t)row * 32768,
        part * 256 + one.group * Consumer::COLUMNS);
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
      for (int j = 0; j < READY; ++j) init(small.k_ready[i][j], 8);
      init(small.k_free[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) init(small.came[i][j], 1);
    }
    barriers_made();
  }
  if (PARTS == 1) __syncthreads(); else cluster_sync();
  const int part = blockIdx.x % PARTS, first = blockIdx.x / PARTS, step = gridDim.x / PARTS;
  if (threadIdx.x >= 256) {
    if (PARTS == 1) fewer_registers<80>();
    const Lists lists = {reinterpret_cast<const unsigned char*>(window), reinterpret_cast<const unsigned char*>(storage),
                         window_index, block_table, row_seq, topk, rows, near_width, far_width, blocks, per_block,
                         units, offset, stride, first, step};
    gather(lists, part, memory, small);
  } else {
    if (PARTS == 1) more_registers<176>();
    consume(reinterpret_cast<const unsigned char*>(query) + part * 512, sink, reinterpret_cast<const int64_t*>(positions),
            cos_sin, reinterpret_cast<__nv_bfloat16*>(out), factor, rows, first, step, part, memory, small);
  }
  // The other of a pair may still send.
  if (PARTS == 2) cluster_sync();
}
