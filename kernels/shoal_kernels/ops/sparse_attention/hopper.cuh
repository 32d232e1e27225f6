// The Hopper kernel: one row at a time on every multiprocessor, four warpgroups with a role each.
//
// Warpgroup 0 computes scores and weights of a tile of 64 keys, warpgroups 1 and 2 the weighted sum of 256 dims each,
// warpgroup 3 gathers and dequantises tiles ahead of them. Each role waits only for barriers in shared memory, so that
// decoding, scores, weights and sums of different tiles overlap.
//
// Shared memory: queries [64, 512], two stages of keys [64, 512], both as panels of [64, 64] bfloat16 with the 128-byte
// swizzle, two stages of weights [64, 64]; then the small arrays of Small.
//
// The text in front of this file is INTRINSICS, GATHER and FINISH of `tilelang_source`, the wgmma functions, and the
// sizes FREQUENCIES, HAS_ENTRIES and CAST_OUT.

namespace shoal {

constexpr int PANEL = 8192, TILE_BYTES = 8 * PANEL;
constexpr int QUERY = 0, KEYS = TILE_BYTES, WEIGHTS = 3 * TILE_BYTES, SMALL = WEIGHTS + 2 * PANEL;
constexpr int LAST = 1 << 16;  // beside the number of keys of a tile: it is the last of its row

struct Small {
  u64 k_ready[2][2], k_free[2], p_ready[2], p_free[2];
  int tile[2];
  float shrink[2][64], total[2][64];
};

#ifndef FENCE_READER
#define FENCE_READER 0
#endif
__device__ __forceinline__ void fence_writer() { if (!FENCE_READER) fence_async(); }
__device__ __forceinline__ void fence_reader() { if (FENCE_READER) fence_async(); }

// Operands with the 128-byte swizzle: groups of 8 rows 1,024 bytes apart; `leading` bytes between panels of a
// transposed one.
__device__ __forceinline__ u64 operand(u32 address, u32 leading) {
  return (u64(1) << 62) | (u64(64) << 32) | (u64(leading >> 4) << 16) | (address >> 4 & 0x3FFF);
}

struct Lists {
  const unsigned char *window, *storage;
  const int *window_index, *table, *row_seq, *topk;
  int rows, near_width, far_width, blocks, per_block, units, offset, stride, step;
};

// The tiles of this multiprocessor's rows, one after another.
struct Cursor {
  int row, t, near, far, near_tiles, tiles, near_tail, far_tail;

  __device__ __forceinline__ void ask_tails(const Lists& lists, int of) {
    near_tail = far_tail = -1;
    if (of < lists.rows) {
      near_tail = __ldg(lists.window_index + (int64_t)(of + 1) * lists.near_width - 1);
      if (HAS_ENTRIES) far_tail = __ldg(lists.topk + (int64_t)(of + 1) * lists.far_width - 1);
    }
  }
  // Lists are usually full: their last entries tell, which were asked for a row before.
  __device__ __forceinline__ void open(const Lists& lists) {
    t = 0;
    if (row >= lists.rows) return;
    near = near_tail >= 0 ? lists.near_width
                          : shoal_count(lists.window_index + (int64_t)row * lists.near_width, lists.near_width);
    far = 0;
    if (HAS_ENTRIES)
      far = far_tail >= 0 ? lists.far_width
                          : shoal_count(lists.topk + (int64_t)row * lists.far_width, lists.far_width);
    near_tiles = (near + 63) >> 6;
    tiles = max(near_tiles + ((far + 63) >> 6), 1);  // an empty list has one tile of no keys
    ask_tails(lists, row + lists.step);
  }
  __device__ __forceinline__ void next(const Lists& lists) {
    if (++t < tiles) return;
    row += lists.step;
    open(lists);
  }
};

// What is known of a tile before its bytes: for both keys of this thread the id, then the block.
struct Ahead {
  int id[2], block[2], place[2], row, tile;  // tile: keys | LAST; row < 0 beyond the end
  bool is_near;

  __device__ __forceinline__ void ask_ids(const Lists& lists, Cursor& cursor, int key) {
    row = -1;
    is_near = false;
    id[0] = id[1] = -1;
    if (cursor.row >= lists.rows) return;
    row = cursor.row;
    is_near = cursor.t < cursor.near_tiles;
    const int first = (is_near ? cursor.t : cursor.t - cursor.near_tiles) * 64;
    const int count = (is_near ? cursor.near : cursor.far) - first;
    tile = max(min(count, 64), 0) | (cursor.t == cursor.tiles - 1 ? LAST : 0);
    const int* list = is_near ? lists.window_index + (int64_t)row * lists.near_width
                              : lists.topk + (int64_t)row * lists.far_width;
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (key + g * 8 < count) id[g] = __ldg(list + first + key + g * 8);
    cursor.next(lists);
  }
  __device__ __forceinline__ void ask_blocks(const Lists& lists) {
    if (!HAS_ENTRIES || is_near || row < 0) return;
    const int* table = lists.table + (int64_t)__ldg(lists.row_seq + row) * lists.blocks;
#pragma unroll
    for (int g = 0; g < 2; ++g)
      if (id[g] >= 0) {
        const int number = (u32)id[g] / (u32)lists.per_block;
        block[g] = __ldg(table + number);
        place[g] = lists.offset + (id[g] - number * lists.per_block) * lists.stride;
      }
  }
  __device__ __forceinline__ const unsigned char* record(const Lists& lists, int g) const {
    if (id[g] < 0) return lists.window;
    if (!HAS_ENTRIES || is_near) return lists.window + (int64_t)id[g] * 528;
    return lists.storage + (int64_t)block[g] * lists.units + place[g];
  }
};

// Chunks of 16 bytes in flight: of each of two keys chunks p * 4 + lane / 8. All of an entry, half of a window record.
struct Unit {
  uint4 raw[8];
  u32 scales[8];
  const unsigned char *data[2], *scale[2];
  int scale_step;

  __device__ __forceinline__ void aim(const Lists& lists, const Ahead& tile, int half) {
    const int quarter = (threadIdx.x & 31) >> 3;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const unsigned char* record = tile.record(lists, g);
      data[g] = record + quarter * 16 + (tile.is_near ? half * 256 : 0);
      scale[g] = record + (tile.is_near ? 512 + half * 8 : 256 + quarter * 2);
    }
    scale_step = tile.is_near ? 2 : 8;
  }
  __device__ __forceinline__ void load(int p, int g) {
    raw[p * 2 + g] = load16(data[g] + p * 64);
    scales[p * 2 + g] = load2(scale[g] + p * scale_step);
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
    for (int g = 0; g < 2; ++g) decode<NEAR>(P, g, places, exists);
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

__device__ __forceinline__ void gather(const Lists& lists, unsigned char* memory, Small& small) {
  const int thread = threadIdx.x & 127, quarter = (thread & 31) >> 3, key = (thread >> 5) * 16 + (thread & 7);
  const u32 keys = address_of(memory + KEYS) + key * 128;
  Cursor cursor;
  cursor.row = blockIdx.x;
  cursor.ask_tails(lists, cursor.row);
  cursor.open(lists);
  Ahead now, next, later;
  now.ask_ids(lists, cursor, key);
  next.ask_ids(lists, cursor, key);
  later.ask_ids(lists, cursor, key);
  now.ask_blocks(lists);
  next.ask_blocks(lists);
  Unit unit;
  unit.aim(lists, now, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) unit.load(i >> 1, i & 1);
#pragma unroll 1
  for (int step = 0; now.row >= 0; ++step) {
    // Bytes of the next tile are asked for while this one is decoded, blocks a tile and ids two tiles before that.
    later.ask_blocks(lists);
    Ahead beyond;
    beyond.ask_ids(lists, cursor, key);
    const int stage = step & 1;
    const u32 tile = keys + stage * TILE_BYTES;
    const bool exists[2] = {now.id[0] >= 0, now.id[1] >= 0};
    if (now.is_near)
      unit.aim(lists, now, 1);
    else
      unit.aim(lists, next, 0);
    wait(small.k_free[stage], (step >> 1 & 1) ^ 1);
    if (thread == 0) small.tile[stage] = now.tile;
    if (now.is_near) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (half) unit.aim(lists, next, 0);
        u32 places[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          places[i] = tile + half * 4 * PANEL + (((quarter * 2 + i) ^ (key & 7)) << 4);
        unit.steps<true>(0, 4, places, exists);
        fence_writer();
        arrive(small.k_ready[stage][half]);
      }
    } else {
      u32 places[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        places[i] = tile + (quarter >> 1) * PANEL + ((((quarter & 1) * 4 + i) ^ (key & 7)) << 4);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        unit.steps<false>(half * 2, half * 2 + 2, places, exists);
        fence_writer();
        arrive(small.k_ready[stage][half]);
      }
    }
    now = next;
    next = later;
    later = beyond;
  }
}

// Where 16-byte chunk i of this thread lies in the queries of a row and in shared memory.
__device__ __forceinline__ u32 query_place(int i) {
  const int head = (i >> 1) * 4 + ((threadIdx.x & 127) >> 5), chunk = (i & 1) * 32 + (threadIdx.x & 31);
  return QUERY + (chunk >> 3) * PANEL + head * 128 + (((chunk & 7) ^ (head & 7)) << 4);
}
__device__ __forceinline__ void ask_query(const unsigned char* query, unsigned char* memory) {
#pragma unroll 8
  for (int i = 0; i < 32; ++i) {
    const int head = (i >> 1) * 4 + ((threadIdx.x & 127) >> 5), chunk = (i & 1) * 32 + (threadIdx.x & 31);
    copy16(address_of(memory + query_place(i)), query + head * 1024 + chunk * 16);
  }
}
// Puts the dims of the queries that came in the order of the keys; each thread turns what it asked for.
__device__ __forceinline__ void turn_query(unsigned char* memory) {
  copies_done();
#pragma unroll 4
  for (int i = 0; i < 32; ++i) {
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

__device__ __forceinline__ void weigh(
    const unsigned char* query, const float* sink, float factor, int rows, int step_rows, unsigned char* memory,
    Small& small) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, head = warp * 16 + (lane >> 2);
  const u64 q = operand(address_of(memory + QUERY), 16), k = operand(address_of(memory + KEYS), 16);
  const u32 row_in_tile = warp * 16 + (lane & 15);
  const u32 p_row = address_of(memory + WEIGHTS) + row_in_tile * 128, p_chunk = lane >> 4, p_swizzle = lane & 7;
  float start[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) start[i] = fmaxf(sink[head + i * 8] * 1.4426950408889634f, -1e30f);
  int step = 0;
  if (blockIdx.x < rows) ask_query(query + (int64_t)blockIdx.x * 65536, memory);
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += step_rows) {
    turn_query(memory);
    const unsigned char* next_query = query + (int64_t)(row + step_rows) * 65536;
    const bool is_more = row + step_rows < rows;
    if (is_more) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ask(next_query + (i * 128 + thread) * 128);
    }
    float peak[2], total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      peak[i] = start[i];
      // A thread has the sum of its own keys; one of the four adds the sink.
      total[i] = lane & 3 ? 0.0f : shoal_exp2(sink[head + i * 8] * 1.4426950408889634f - start[i]);
    }
    bool is_last;
#pragma unroll 1
    do {
      const int stage = step & 1;
      const u32 parity = step >> 1 & 1;
      const u64 keys_at = k + stage * (TILE_BYTES >> 4);
      float s[32];
      wait(small.k_ready[stage][0], parity);
      const int tile = small.tile[stage], keys = tile & (LAST - 1);
      is_last = tile & LAST;
      fence_reader();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 16; ++i)
        wgmma_scores(s, q + (i >> 2) * (PANEL >> 4) + (i & 3) * 2, keys_at + (i >> 2) * (PANEL >> 4) + (i & 3) * 2, i > 0);
      wait(small.k_ready[stage][1], parity);
      fence_reader();
#pragma unroll
      for (int i = 16; i < 32; ++i)
        wgmma_scores(s, q + (i >> 2) * (PANEL >> 4) + (i & 3) * 2, keys_at + (i >> 2) * (PANEL >> 4) + (i & 3) * 2, 1);
      wgmma_done();
      if (is_last && is_more) {
        warpgroup_sync();
        ask_query(next_query, memory);
      }
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
      wait(small.p_free[stage], parity ^ 1);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        store_matrices(
            p_row + stage * PANEL + (((j * 2 + p_chunk) ^ p_swizzle) << 4), pack2(s[j * 8], s[j * 8 + 1]),
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
      ++step;
    } while (!is_last);
  }
}

__device__ __forceinline__ void add(
    int half, const int64_t* positions, const float* cos_sin, __nv_bfloat16* out, int rows, int step_rows,
    unsigned char* memory, Small& small) {
  const int lane = threadIdx.x & 31, head = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
  const u64 p = operand(address_of(memory + WEIGHTS), 16);
  const u64 v = operand(address_of(memory + KEYS + half * 4 * PANEL), PANEL);
  int step = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += step_rows) {
    float acc[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    float inverse[2];
    bool is_last;
#pragma unroll 1
    do {
      const int stage = step & 1;
      const u32 parity = step >> 1 & 1;
      wait(small.k_ready[stage][half], parity);
      wait(small.p_ready[stage], parity);
      fence_reader();
      is_last = small.tile[stage] & LAST;
      const float first = small.shrink[stage][head], second = small.shrink[stage][head + 8];
      if (is_last) {
        // Keys were held times 2^-10.
        inverse[0] = __fdividef(1024.0f, small.total[stage][head]);
        inverse[1] = __fdividef(1024.0f, small.total[stage][head + 8]);
      }
      // Leaving out a product with one changes no bit.
      if (__any_sync(0xffffffffu, first != 1.0f || second != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
          acc[i] *= first;
          acc[i + 1] *= first;
          acc[i + 2] *= second;
          acc[i + 3] *= second;
        }
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i)
        wgmma_sum(acc + (i & 1) * 64, p + stage * (PANEL >> 4) + (i >> 1) * 2,
                  v + stage * (TILE_BYTES >> 4) + (i >> 1) * 128 + (i & 1) * (2 * PANEL >> 4));
      wgmma_done();
      arrive(small.k_free[stage]);
      arrive(small.p_free[stage]);
      ++step;
    } while (!is_last);
    shoal_finish_as<CAST_OUT, FREQUENCIES>(
        acc, inverse, cos_sin + positions[row] * (2 * FREQUENCIES), out + (int64_t)row * 32768, half * 256);
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
    for (int i = 0; i < 2; ++i) {
      init(small.k_ready[i][0], 4);
      init(small.k_ready[i][1], 4);
      init(small.k_free[i], 8);
      init(small.p_ready[i], 4);
      init(small.p_free[i], 8);
    }
    barriers_made();
  }
  __syncthreads();
  const int role = threadIdx.x >> 7;
  if (role == 3) {
    fewer_registers<112>();
    const Lists lists = {reinterpret_cast<const unsigned char*>(window), reinterpret_cast<const unsigned char*>(storage),
                         window_index, block_table, row_seq, topk, rows, near_width, far_width, blocks, per_block,
                         units, offset, stride, (int)gridDim.x};
    gather(lists, memory, small);
  } else if (role == 0) {
    fewer_registers<80>();
    weigh(reinterpret_cast<const unsigned char*>(query), sink, factor, rows, gridDim.x, memory, small);
  } else {
    more_registers<160>();
    add(role - 1, reinterpret_cast<const int64_t*>(positions), cos_sin, reinterpret_cast<__nv_bfloat16*>(out), rows,
        gridDim.x, memory, small);
  }
}
