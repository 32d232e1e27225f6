// The roles of the Hopper kernel that compute: scores and weights, sums, output.

namespace shoal {

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
