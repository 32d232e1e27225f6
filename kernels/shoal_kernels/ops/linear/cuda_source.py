"""CUDA pieces of the TileLang linear: what its language has no words for."""

SOURCE = r"""
// Two e4m3 bytes -> two bfloat16, times `factor` (a bfloat16 twice: 2^120 times the scale of the block). The seven bits
// of the magnitude lie over the lowest exponent bits and the highest mantissa bits: that is the value times 2^-120,
// subnormals included, and the product is exact.
// The permutation puts a byte of the sign above each byte, so that one shift and one mask are left.
__device__ __forceinline__ unsigned shoal_decode_pair(unsigned short pair, unsigned factor) {
  unsigned spread, value;
  asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(spread) : "r"(unsigned(pair)));
  const unsigned bits = spread * 16 & 0x87f087f0u;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(bits), "r"(factor));
  return value;
}

// A warpgroup's e4m3 tile [64, STEP] in shared memory, swizzled as the copy engine wrote it, to the registers of the
// A operand of wgmma: per 16 of K rows g and g + 8, columns 2q, 2q + 1 and 2q + 8, 2q + 9 for lane 4g + q.
// factors: one per 32 of K.
template <int STEP>
__device__ __forceinline__ void shoal_dequantise(const unsigned char* tile, const unsigned* factors, void* fragment) {
  unsigned* registers = reinterpret_cast<unsigned*>(fragment);
  const int lane = threadIdx.x & 31, row = ((threadIdx.x >> 5) & 3) * 16 + lane / 4;
  const int phase = STEP == 64 ? (row >> 1) & 3 : row & 7;
  const int base = row * STEP + phase * 16 + (lane & 3) * 2;
#pragma unroll
  for (int chunk = 0; chunk < STEP / 16; ++chunk) {
    const unsigned char* place = tile + (base ^ (chunk * 16));
    const unsigned factor = factors[chunk / 2];
#pragma unroll
    for (int part = 0; part < 4; ++part)
      registers[chunk * 4 + part] = shoal_decode_pair(
          *reinterpret_cast<const unsigned short*>(place + (part & 1) * 8 * STEP + (part >> 1) * 8), factor);
  }
}

// The scales of ROWS block rows from `row` on and `count` block columns from `first` on, as factors of
// shoal_decode_pair. A tile waits for them, so a thread has several loads of two scales in flight; columns are even.
template <int ROWS, int THREADS>
__device__ __forceinline__ void shoal_factors(const unsigned char* __restrict__ scale, unsigned* __restrict__ factors,
                                              int pitch, int row, int rows, int first, int count, int columns,
                                              int thread) {
  constexpr int PER_ROW = THREADS / ROWS, LOADS = 8;
  const int block = thread / PER_ROW;
  const unsigned char* source = scale + static_cast<long long>(min(row + block, rows - 1)) * columns;
  for (int start = thread % PER_ROW * 2; start < count; start += PER_ROW * 2 * LOADS) {
    uchar2 pairs[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      pairs[i] = *reinterpret_cast<const uchar2*>(source + min(first + start + i * PER_ROW * 2, columns - 2));
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int column = start + i * PER_ROW * 2;
      if (column < count)
        *reinterpret_cast<uint2*>(factors + block * pitch + column) =
            make_uint2((pairs[i].x + 120u) * 0x00800080u, (pairs[i].y + 120u) * 0x00800080u);
    }
  }
}

// Sums of a warpgroup [64 outputs, ROWS rows], as wgmma leaves them, to bfloat16 [ROWS, 64] in shared memory with the
// 128-byte swizzle of the copy engine.
template <int ROWS>
__device__ __forceinline__ void shoal_store_transposed(const float* sums, int part, void* tile) {
  unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const int lane = threadIdx.x & 31, chunk = ((threadIdx.x >> 5) & 3) * 2 + ((lane >> 3) & 1);
  base += ((lane >> 4) * 8 + (lane & 7)) * 128 + ((chunk ^ (lane & 7)) * 16);
#pragma unroll
  for (int row = 0; row < ROWS; row += 16) {
    const float* s = sums + (part * ROWS + row) / 2;
    unsigned packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[i]) : "f"(s[2 * i + 1]), "f"(s[2 * i]));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(base + row * 128),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
  }
}

// Sums of earlier segments, where registers hold one segment's only: each of THREADS threads keeps its own in
// `scratch`, the block's float32 [THREADS * ROWS / 2]. They are added in the order of the segments.
template <int ROWS, int THREADS>
__device__ __forceinline__ void shoal_park(float* sums, float* scratch, bool first, bool last) {
  float4* place = reinterpret_cast<float4*>(scratch) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < ROWS / 8; ++i) {
    float4 before = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!first) before = __ldcg(place + i * THREADS);
    float* s = sums + i * 4;
    s[0] = before.x + s[0], s[1] = before.y + s[1], s[2] = before.z + s[2], s[3] = before.w + s[3];
    if (!last) __stcg(place + i * THREADS, make_float4(s[0], s[1], s[2], s[3]));
  }
}

// Where the A operand cannot come from registers (SM100): 128 threads write a tile [128, STEP] of e4m3 as bfloat16,
// both swizzled as the copy engine swizzles their rows. A thread has one row of the tile.
template <int STEP>
__device__ __forceinline__ void shoal_dequantise_tile(const unsigned char* tile, const unsigned* factors, int pitch,
                                                      void* out) {
  static_assert(STEP == 64, "one row is 64 bytes of e4m3 and 128 of bfloat16");
  const int row = threadIdx.x & 127;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    const uint4 stored = *reinterpret_cast<const uint4*>(tile + row * 64 + ((chunk ^ ((row >> 1) & 3)) * 16));
    const unsigned words[4] = {stored.x, stored.y, stored.z, stored.w};
    const unsigned factor = factors[row / 32 * pitch + chunk / 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 values;
      values.x = shoal_decode_pair(words[half * 2] & 0xffff, factor);
      values.y = shoal_decode_pair(words[half * 2] >> 16, factor);
      values.z = shoal_decode_pair(words[half * 2 + 1] & 0xffff, factor);
      values.w = shoal_decode_pair(words[half * 2 + 1] >> 16, factor);
      const int place = row * 128 + (((chunk * 2 + half) ^ (row & 7)) * 16);
      *reinterpret_cast<uint4*>(static_cast<char*>(out) + place) = values;
    }
  }
}

// The blocks of a cluster hold the partial sums of one tile, a segment each, as float32 [ROWS, PITCH] in shared memory:
// each adds every BLOCKS-th row of all of them, in the order of the segments, and writes it out.
template <int ROWS, int COLUMNS, int BLOCKS, typename Value>
__device__ __forceinline__ void shoal_add_segments(const float* partial, Value* out, int row, int rows, int column,
                                                   int width, int rank, int threads) {
  constexpr int PITCH = COLUMNS + 4, QUADS = COLUMNS / 4;
  const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(partial));
  for (int index = threadIdx.x; index < (ROWS + BLOCKS - 1) / BLOCKS * QUADS; index += threads) {
    const int r = index / QUADS * BLOCKS + rank, n = index % QUADS * 4;
    if (r >= ROWS || row + r >= rows || column + n >= width) continue;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      unsigned place;
      float4 part;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(own + (r * PITCH + n) * 4), "r"(block));
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                   : "r"(place)
                   : "memory");
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    Value* target = out + static_cast<long long>(row + r) * width + column + n;
    if constexpr (sizeof(Value) == 4) {
      *reinterpret_cast<float4*>(target) = total;
    } else {
      uint2 packed;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.x) : "f"(total.y), "f"(total.x));
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.y) : "f"(total.w), "f"(total.z));
      *reinterpret_cast<uint2*>(target) = packed;
    }
  }
}
"""

WGMMA_SOURCE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>

// The lower word of the descriptor of a tile with rows of 128 bytes and the 128-byte swizzle: the same in all lanes,
// and the shuffle tells the compiler so, which then keeps it and its sums with constants in uniform registers.
__device__ __forceinline__ unsigned shoal_place(const void* tile) {
  const unsigned place = (static_cast<unsigned>(__cvta_generic_to_shared(tile)) >> 4 & 0x3fff) | 0x10000u;
  return __shfl_sync(0xffffffffu, place, 0);
}
// The descriptor `offset` 16-byte units into the tile.
__device__ __forceinline__ uint64_t shoal_descriptor(unsigned place, int offset) {
  return uint64_t(0x40000040u) << 32 | (place + offset);
}

// Left alone, the warpgroups would multiply together and then dequantise together, so they take turns at starting a
// product (named barriers from 2 on). Before the first turn the last warpgroup passes it to the first.
__device__ __forceinline__ void shoal_take_turn() {
  asm volatile("bar.sync %0, 256;" ::"r"(2 + threadIdx.x / 128) : "memory");
}
template <int WARPGROUPS>
__device__ __forceinline__ void shoal_pass_turn() {
  asm volatile("bar.arrive %0, 256;" ::"r"(2 + (threadIdx.x / 128 + 1) % WARPGROUPS) : "memory");
}
template <int WARPGROUPS>
__device__ __forceinline__ void shoal_first_turn() {
  if (threadIdx.x / 128 == WARPGROUPS - 1) shoal_pass_turn<WARPGROUPS>();
}

// Starts sums [64, ROWS] += weight tile [64, STEP] (in registers) times x tile [ROWS, STEP] transposed. The x tile is
// panels [ROWS, 64]. The caller waits, and keeps off the registers until then.
template <int ROWS, int STEP, int WARPGROUPS>
__device__ __forceinline__ void shoal_multiply(void* fragment, const void* x, float* sums) {
  unsigned* operand = static_cast<unsigned*>(fragment);
  const unsigned place = shoal_place(x);
  shoal_take_turn();
  tl::warpgroup_fence_operand(operand, STEP / 4);
  tl::warpgroup_fence_operand(sums, ROWS / 2);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < STEP / 16; ++k)
    tl::wgmma_rs<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, ROWS, 16, false, false>(
        operand + k * 4, shoal_descriptor(place, k / 4 * ROWS * 8 + k % 4 * 2), reinterpret_cast<uint32_t*>(sums),
        true);
  tl::warpgroup_commit_batch();
  shoal_pass_turn<WARPGROUPS>();
  tl::warpgroup_fence_operand(sums, ROWS / 2);
  tl::warpgroup_fence_operand(operand, STEP / 4);
}

// The same with the weight tile [64, 64] of bfloat16 in shared memory.
template <int ROWS>
__device__ __forceinline__ void shoal_multiply_shared(const void* weight, const void* x, float* sums) {
  const unsigned left = shoal_place(weight), right = shoal_place(x);
  tl::warpgroup_fence_operand(sums, ROWS / 2);
  tl::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, ROWS, 16, false, false>(
        shoal_descriptor(left, k * 2), shoal_descriptor(right, k * 2), reinterpret_cast<uint32_t*>(sums), true);
  tl::warpgroup_commit_batch();
  tl::warpgroup_fence_operand(sums, ROWS / 2);
}
"""
