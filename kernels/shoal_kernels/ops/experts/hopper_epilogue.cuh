// Behind hopper.cuh: what happens to the accumulators, and the body of the kernel.

__device__ __forceinline__ float activation(float gate, float up, float weight, float limit) {
  gate = fminf(rounded(gate), limit);
  up = fmaxf(fminf(rounded(up), limit), -limit);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up * weight;
}

// acc[0], acc[1] are gate and up: u = Q8 of the activation, in the tiled layout of the next product's rows.
__device__ __forceinline__ void store_activation(Consumer& c, char* smem, u32 base, const Tile& tile, float limit,
                                                 char* out, int groups) {
  const int lane = c.lane, pair = 2 * (lane & 3), group = threadIdx.x / 128, warp = c.warp & 3;
  const float* weight = (const float*)(smem + COLUMN);
  float* amax = (float*)(smem + AMAX);
  float(&u)[BN / 2] = c.acc[0];
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 8 * j + pair + e;
      const float w = weight[column];
      u[4 * j + e] = activation(c.acc[0][4 * j + e], c.acc[1][4 * j + e], w, limit);
      u[4 * j + 2 + e] = activation(c.acc[0][4 * j + 2 + e], c.acc[1][4 * j + 2 + e], w, limit);
      float largest = fmaxf(fabsf(u[4 * j + e]), fabsf(u[4 * j + 2 + e]));
#pragma unroll
      for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane < 4) amax[c.warp * BN + column] = largest;
    }
  }
  // Also: every multiplication has read its rows, so their memory is free for the output.
  named_barrier(1, 256);
#pragma unroll
  for (int j = 0; j < BN / 8; j += 2) {
    u32 packed[4];
#pragma unroll
    for (int block = 0; block < 2; block++) {
      const int first = 4 * (j + block);
      float low[2], high[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 8 * (j + block) + pair + e;
        const float largest = fmaxf(fmaxf(amax[c.warp * BN + column], amax[(c.warp ^ 1) * BN + column]), 1e-4f);
        const u32 scale = (__float_as_uint(__fdiv_rn(largest, 448.0f)) + 0x007FFFFFu) & 0x7F800000u;
        const float inverse = __uint_as_float(0x7F000000u - scale);
        unsigned short bytes;
        u32 halves;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes)
            : "f"(u[first + 2 + e] * inverse), "f"(u[first + e] * inverse));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
        float values[2];
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
            : "=f"(values[0]), "=f"(values[1]) : "r"(halves));
        low[e] = values[0] * __uint_as_float(scale);
        high[e] = values[1] * __uint_as_float(scale);
      }
      packed[2 * block] = pack_bf16(low[0], low[1]);
      packed[2 * block + 1] = pack_bf16(high[0], high[1]);
    }
    const int column = 8 * j + (lane & 7) + (lane & 16) / 2, chunk = 2 * warp + (lane >> 3 & 1);
    store_matrices(base + X_RING + group * X_BYTES + column * 128 + ((chunk ^ (column & 7)) * 16), packed[0],
                   packed[1], packed[2], packed[3]);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  named_barrier(2 + group, 128);
  if (threadIdx.x % 128 == 0) {
    const size_t block = blockIdx.x * 2 + group;
    copy_out(out + (block * groups + tile.slot / 8) * 1024, base + X_RING + group * X_BYTES, tile.padded * 128);
    copies_out_done();
  }
}

// acc[0], acc[1] are rows 64w.. and 128 + 64w.. of down: bfloat16 to the rows of the pairs.
__device__ __forceinline__ void store_outputs(Consumer& c, char* smem, u32 base, const Tile& tile, char* out) {
  const int lane = c.lane, group = threadIdx.x / 128, warp = c.warp & 3;
  named_barrier(1, 256);
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
      const float* v = c.acc[half] + 4 * j;
      const int column = 8 * j + (lane & 7) + (lane & 16) / 2, chunk = 16 * half + 8 * group + 2 * warp + (lane >> 3 & 1);
      store_matrices(base + X_RING + column * PITCH + chunk * 16, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                     pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  named_barrier(1, 256);
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
                                               int groups, unsigned char* memory) {
  char* smem = (char*)memory;
  const u32 base = address_of(smem), bars = base + BARRIERS;
  const Tile tile = find_tile(starts, blockIdx.y);
  if (tile.expert < 0) return;
  const bool is_shared = SHARED && tile.expert == EXPERTS;
  const Ring word_ring(bars, base + W_RING, W_UNITS, UNIT_BYTES);
  const Ring row_ring(bars + 16 * W_UNITS, base + X_RING, X_UNITS, X_BYTES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < W_UNITS; i++) barrier_init(word_ring.full + 8 * i, 1), barrier_init(word_ring.empty + 8 * i, 8);
    for (int i = 0; i < X_UNITS; i++) barrier_init(row_ring.full + 8 * i, 1), barrier_init(row_ring.empty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = threadIdx.x; i < BN; i += 384) {
    const bool inside = i < tile.columns;
    ((float*)(smem + COLUMN))[i] = inside ? slot_weight[tile.slot + i] : 0.0f;
    ((int*)(smem + COLUMN + BN * 4))[i] = inside ? slot_pair[tile.slot + i] : 0;
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) {
      const size_t expert = is_shared ? 0 : tile.expert;
      const int units = is_shared ? 4 : 2;
      produce_words(word_ring, (const char*)(is_shared ? shared_words : words) + expert * BLOCKS * units * ROWS * 64,
                    (const char*)(is_shared ? shared_scales : scales) + expert * BLOCKS * ROWS * 8, units);
    } else if (threadIdx.x == 288) {
      produce_rows(row_ring, (const char*)x, tile.slot, groups);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, row = 64 * (warp / 4) + 16 * (warp & 3);
    Consumer c{word_ring, row_ring};
    c.lane = lane, c.warp = warp;
    const int from = row + (lane & 15);
    c.word_row = from * 64 + (((lane >> 4) ^ (from >> 1 & 3)) * 16);
    c.scale_row = (row + lane / 4) * 8;
#pragma unroll
    for (int i = 0; i < BN / 2; i++) c.acc[0][i] = 0.0f, c.acc[1][i] = 0.0f;
    if (SHARED && is_shared) c.template run<false>();
    else c.template run<true>();
    if (GATE_UP) store_activation(c, smem, base, tile, limit, (char*)out, groups);
    else store_outputs(c, smem, base, tile, (char*)out);
  }
}
