// Behind hopper.cuh: which rows a block takes, what happens to the accumulators, and the body of the kernel.

struct Tile {
  int expert, slot, columns, padded;  // columns: rows of the expert in this tile; padded: to a multiple of 8
};

// Tile `index` of the experts from..to.
__device__ __forceinline__ Tile find_tile(const int* starts, int from, int to, int index) {
  const int lane = threadIdx.x & 31;
  int before = 0;
  Tile tile{-1, 0, 0, 0};
  for (int first = from; first < to; first += 32) {
    const int expert = first + lane;
    const bool inside = expert < to;
    const int start = inside ? starts[expert] : 0, count = inside ? starts[expert + 1] - start : 0;
    const int tiles = (count + BN - 1) / BN;
    int sum = tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    const bool mine = index >= before + sum - tiles && index < before + sum;
    const u32 found = __ballot_sync(~0u, mine);
    if (found) {
      const int source = __ffs(found) - 1;
      const int done = (index - (before + sum - tiles)) * BN;
      const int slot = ((start + 7) & ~7) + 8 * expert + done;
      tile.expert = first + source;
      tile.slot = __shfl_sync(~0u, slot, source);
      tile.columns = min(BN, __shfl_sync(~0u, count - done, source));
      tile.padded = (tile.columns + 7) & ~7;
      return tile;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return tile;
}

__device__ __forceinline__ float activation(float gate, float up, float weight, float limit) {
  gate = fminf(rounded(gate), limit);
  up = fmaxf(fminf(rounded(up), limit), -limit);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
}

// acc holds gate (elements 0, 1 of four) and up (2, 3): u = Q8 of the activation, in the tiled layout of the next
// product's rows. A warpgroup's operand is one group of 32 for Q8, a warp 8 of it.
__device__ __forceinline__ void store_activation(Consumer& c, char* smem, u32 base, const Tile& tile, float limit,
                                                 char* out, int groups) {
  const int lane = c.lane, pair = 2 * (lane & 3), warp = c.warp & 3, first = c.warp / 4 * TILES;
  const float* weight = (const float*)(smem + COLUMN);
  float* amax = (float*)(smem + AMAX);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < BN / 4; i++) {
      const int at = i / 2 * 4 + (i & 1), column = 8 * (i / 2) + pair + (i & 1);
      c.acc[t][at] = activation(c.acc[t][at], c.acc[t][at + 2], weight[column], limit);
      float largest = fabsf(c.acc[t][at]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane < 4) amax[((first + t) * 4 + warp) * BN + column] = largest;
    }
  }
  // Also: every multiplication has read its rows, so their memory is free for the output.
  named_barrier(1, CONSUMERS);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const float* group = amax + (first + t) * 4 * BN;
    const int chunk = ((first + t) & 1) * 4 + warp;
    const u32 block = base + X_RING + (first + t) / 2 * X_BYTES;
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      u32 packed[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float* u = c.acc[t] + 4 * (j + k);
        u32 scale[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = 8 * (j + k) + pair + e;
          const float largest = fmaxf(fmaxf(fmaxf(group[column], group[BN + column]),
                                            fmaxf(group[2 * BN + column], group[3 * BN + column])), 1e-4f);
          scale[e] = (__float_as_uint(__fdiv_rn(largest, 448.0f)) + 0x007FFFFFu) & 0x7F800000u;
        }
        unsigned short bytes;
        u32 halves;
        float low, high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes)
            : "f"(u[1] * __uint_as_float(0x7F000000u - scale[1])), "f"(u[0] * __uint_as_float(0x7F000000u - scale[0])));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
            : "=f"(low), "=f"(high) : "r"(halves));
        packed[k] = pack_bf16(low * __uint_as_float(scale[0]), high * __uint_as_float(scale[1]));
      }
      const int column = 8 * j + (lane & 15);
      store_matrices(block + column * 128 + ((chunk ^ (column & 7)) * 16), packed[0], packed[1]);
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  named_barrier(1, CONSUMERS);
  if (threadIdx.x < 2) {
    const size_t block = blockIdx.x * 2 + threadIdx.x;
    copy_out(out + (block * groups + tile.slot / 8) * 1024, base + X_RING + threadIdx.x * X_BYTES, tile.padded * 128);
    copies_out_done();
  }
}

// acc holds 64 rows of down an operand: bfloat16 to the rows of the pairs.
__device__ __forceinline__ void store_outputs(Consumer& c, char* smem, u32 base, const Tile& tile, char* out) {
  const int lane = c.lane, warp = c.warp & 3, first = c.warp / 4 * TILES;
  named_barrier(1, CONSUMERS);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      const float* v = c.acc[t] + 4 * j;
      const int column = 8 * j + (lane & 7) + (lane & 16) / 2, chunk = 8 * (first + t) + 2 * warp + (lane >> 3 & 1);
      store_matrices(base + X_RING + column * PITCH + chunk * 16, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                     pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  named_barrier(1, CONSUMERS);
  const int* pairs = (const int*)(smem + COLUMN + BN * 4);
  if (threadIdx.x < tile.columns) {
    const size_t row = pairs[threadIdx.x];
    copy_out(out + (row * ROWS + blockIdx.x * 256) * 2, base + X_RING + threadIdx.x * PITCH, 512);
    copies_out_done();
  }
}

__device__ __forceinline__ void expert_product(const void* x, const void* words, const void* scales,
                                               const void* shared_words, const void* shared_scales, const int* starts,
                                               const int* slot_pair, const float* slot_weight, void* out, float limit,
                                               int groups, int experts, int from, int to, int late, unsigned char* memory) {
  char* smem = (char*)memory;
  const u32 base = address_of(smem);
  Block block(base);
  __syncthreads();
  // The rows' places are known once the gate and up grid runs: it waits for them before it lets the down grid start,
  // which therefore waits in front of its rows only. What follows the last grid (`late`) would gather on the few
  // multiprocessors without a block of this one.
  if (GATE_UP) grid_wait();
  if (!late) let_next_grid_start();
  // From the last expert on: the shared one, whose tiles take longest, is not left for the end.
  const Tile tile = find_tile(starts, from, to, gridDim.y - 1 - blockIdx.y);
  if (tile.expert < 0) return;
  const bool is_shared = tile.expert == experts;
  const size_t expert = is_shared ? 0 : tile.expert;
  const int units = is_shared ? 4 : 2;
  const char* own_words = (const char*)(is_shared ? shared_words : words) + expert * BLOCKS * units * ROWS * 64;
  const char* own_scales = (const char*)(is_shared ? shared_scales : scales) + expert * BLOCKS * ROWS * 8;
  if (threadIdx.x >= CONSUMERS) {
    block.copy((const char*)x, tile.slot, groups, own_words, own_scales, units);
  } else {
    Consumer c = block.consumer((const char*)x, tile.slot, groups, own_words, own_scales);
    // Not by the first warp, which may have rows to copy; nobody waits for it before the epilogue.
    const int column = threadIdx.x - (CONSUMERS - 128);
    if (column >= 0 && column < BN) {
      const bool inside = column < tile.columns;
      ((float*)(smem + COLUMN))[column] = inside ? slot_weight[tile.slot + column] : 0.0f;
      ((int*)(smem + COLUMN + BN * 4))[column] = inside ? slot_pair[tile.slot + column] : 0;
    }
#pragma unroll
    for (int i = 0; i < TILES * BN / 2; i++) c.acc[i / (BN / 2)][i % (BN / 2)] = 0.0f;
    if (is_shared) c.template run<false>();
    else c.template run<true>();
    named_barrier(1, CONSUMERS);
    if (late) let_next_grid_start();
    if (GATE_UP) store_activation(c, smem, base, tile, limit, (char*)out, groups);
    else store_outputs(c, smem, base, tile, (char*)out);
  }
}
