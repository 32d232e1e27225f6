# mypy: ignore-errors
"""CUDA functions that the TileLang kernel calls: gather and dequantise keys, load queries, finish the output.

Order of dims in shared memory and in the accumulators: within every 8 dims 0 4 1 5 2 6 3 7, because the nibbles 4 apart
in a 32-bit word become a bfloat16 pair with a shift and two masks. Keys are held times 2^-10, so that an e2m1 code
placed in a bfloat16 (2^-126 of its value) needs one exact multiplication by 2^116 times its e4m3 scale.

Tiles are [64, 256] bfloat16 as four panels of [64, 64] with the 128-byte swizzle.
"""

INTRINSICS = r"""
#include <cuda_bf16.h>
#include <stdint.h>

namespace shoal {

__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// The nearest e4m3 values, as floats.
__device__ __forceinline__ float2 round_e4m3(float low, float high) {
  unsigned short codes;
  uint32_t halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

__device__ __forceinline__ void ask(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace shoal

__device__ __forceinline__ float shoal_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""

GATHER = r"""
namespace shoal {

// Elements from the start of a tile to 8 dims of a key.
__device__ __forceinline__ int place(int key, int octet) {
  return (octet >> 3) * 4096 + key * 64 + (((octet & 7) ^ (key & 7)) << 3);
}

__device__ __forceinline__ void put(void* tile, int key, int octet, uint4 value) {
  *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(tile) + place(key, octet)) = value;
}

__device__ __forceinline__ uint4 decode_fp4(uint32_t w, uint32_t gain) {
  uint4 d;
  d.x = mul2(((w << 12) & 0x80008000u) | ((w << 6) & 0x01C001C0u), gain);
  d.y = mul2(((w << 8) & 0x80008000u) | ((w << 2) & 0x01C001C0u), gain);
  d.z = mul2(((w << 4) & 0x80008000u) | ((w >> 2) & 0x01C001C0u), gain);
  d.w = mul2((w & 0x80008000u) | ((w >> 6) & 0x01C001C0u), gain);
  return d;
}

__device__ __forceinline__ uint32_t decode_fp8(uint32_t a, uint32_t b, uint32_t selector, uint32_t gain) {
  uint32_t t = __byte_perm(a, b, selector);
  // 2^110 first (0x7680): 2^120 for the exponent field, 2^-10 for the key; the group's scale may be anything.
  return mul2(mul2((t & 0x80008000u) | ((t >> 4) & 0x07F007F0u), 0x76807680u), gain);
}

// 32 dims of an entry with two scales. A key past the end of the list becomes zeros.
__device__ __forceinline__ void put_entry(
    void* tile, int key, int octet, const uint32_t* words, uint32_t pair, bool exists) {
  // 2^120 makes the e4m3 scale of its placed bits, 2^116 serves the codes.
  float unit = exists ? 1.329227995784916e36f : 0.0f;
  float low = __uint_as_float((pair & 0x7Fu) << 20) * unit * 8.307674973655724e34f;
  float high = __uint_as_float((pair & 0x7F00u) << 12) * unit * 8.307674973655724e34f;
  uint32_t first = pack2(low, low), second = pack2(high, high);
  put(tile, key, octet + 0, decode_fp4(words[0], first));
  put(tile, key, octet + 1, decode_fp4(words[1], first));
  put(tile, key, octet + 2, decode_fp4(words[2], second));
  put(tile, key, octet + 3, decode_fp4(words[3], second));
}

// 16 dims of a window record, which share a scale byte.
__device__ __forceinline__ void put_window(
    void* tile, int key, int octet, const uint32_t* words, uint32_t scale, bool exists) {
  uint32_t gain = exists ? (scale ? scale << 7 : 0x40u) * 0x10001u : 0u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a = words[half * 2], b = words[half * 2 + 1];
    uint4 d;
    d.x = decode_fp8(a, b, 0x4400u, gain);
    d.y = decode_fp8(a, b, 0x5511u, gain);
    d.z = decode_fp8(a, b, 0x6622u, gain);
    d.w = decode_fp8(a, b, 0x7733u, gain);
    put(tile, key, octet + half, d);
  }
}

}  // namespace shoal

// Number of leading entries of a list that are not -1; every lane of a warp gets it.
__device__ __forceinline__ int shoal_count(const int* list, int width) {
  int count = 0, lane = threadIdx.x & 31;
#pragma unroll 8
  for (int start = 0; start < width; start += 32) {
    int at = start + lane;
    int id = at < width ? __ldg(list + at) : -1;
    count += __popc(__ballot_sync(0xffffffffu, id >= 0));
  }
  return count;
}

// Tiles of a list of `near` window records and `far` entries, and the keys in tile t of them.
__device__ __forceinline__ int shoal_tiles(int near, int far) { return (near + 63) / 64 + (far + 63) / 64; }

__device__ __forceinline__ int shoal_keys(int t, int near, int far) {
  int tiles = (near + 63) / 64;
  return t < tiles ? near - t * 64 : far - (t - tiles) * 64;
}

// Where the records of the two keys of this thread in tile t lie, in units of 16 bytes; -1 past the end of the list.
__device__ __forceinline__ void shoal_places(
    int* places, const int* window_index, const int* topk, const int* table, int t, int near, int far,
    int per_block, int units, int offset, int stride) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, tiles = (near + 63) / 64;
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    int at = warp * 16 + g * 8 + (lane & 7);
    places[g] = -1;
    if (t < tiles) {
      at += t * 64;
      if (at < near) places[g] = __ldg(window_index + at) * 33;
    } else {
      at += (t - tiles) * 64;
      if (at < far) {
        int id = __ldg(topk + at), block = id / per_block;
        places[g] = __ldg(table + block) * (units >> 4) + (offset >> 4) + (id - block * per_block) * (stride >> 4);
      }
    }
  }
}

// Loads of a tile: both keys of entries, or the first key of window records, whose bytes are twice as many.
__device__ __forceinline__ void shoal_load_window(
    unsigned* raw, unsigned* gains, int place, const unsigned char* window) {
  const unsigned char* record = window + (int64_t)max(place, 0) * 16;
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    int chunk = p * 4 + ((threadIdx.x & 31) >> 3);
    uint4 v = __ldg(reinterpret_cast<const uint4*>(record) + chunk);
    raw[p * 4 + 0] = v.x;
    raw[p * 4 + 1] = v.y;
    raw[p * 4 + 2] = v.z;
    raw[p * 4 + 3] = v.w;
    gains[p] = __ldg(record + 512 + (chunk >> 1));
  }
}

__device__ __forceinline__ void shoal_load(
    unsigned* raw, unsigned* gains, const int* places, const unsigned char* window, const unsigned char* storage,
    int t, int near) {
  if (t < (near + 63) / 64) {
    shoal_load_window(raw, gains, places[0], window);
    return;
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const unsigned char* record = storage + (int64_t)max(places[g], 0) * 16;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      int chunk = p * 4 + ((threadIdx.x & 31) >> 3), i = g * 4 + p;
      uint4 v = __ldg(reinterpret_cast<const uint4*>(record) + chunk);
      raw[i * 4 + 0] = v.x;
      raw[i * 4 + 1] = v.y;
      raw[i * 4 + 2] = v.z;
      raw[i * 4 + 3] = v.w;
      gains[i] = __ldg(reinterpret_cast<const unsigned short*>(record + 256) + chunk);
    }
  }
}

// Dequantise what was loaded (and load the second key of window records) into two tiles.
__device__ __forceinline__ void shoal_store(
    unsigned* raw, unsigned* gains, const int* places, const unsigned char* window, int t, int near,
    void* left, void* right) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, quarter = lane >> 3;
  if (t < (near + 63) / 64) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if (g) shoal_load_window(raw, gains, places[1], window);
#pragma unroll
      for (int p = 0; p < 8; ++p)
        shoal::put_window(
            p < 4 ? left : right, warp * 16 + g * 8 + (lane & 7), (p & 3) * 8 + quarter * 2, raw + p * 4, gains[p],
            places[g] >= 0);
    }
    return;
  }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      shoal::put_entry(
          p < 2 ? left : right, warp * 16 + g * 8 + (lane & 7), (p & 1) * 16 + quarter * 4,
          raw + (g * 4 + p) * 4, gains[g * 4 + p], places[g] >= 0);
  }
}

// 256 dims of the queries [64, 512] of a row, from quarter `part` on, into a tile.
__device__ __forceinline__ void shoal_load_query(const void* query, void* tile, int part) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const uint4* source = reinterpret_cast<const uint4*>(query) + part * 16;
#pragma unroll 1
  for (int start = 0; start < 64; start += 16) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __ldg(source + (start + warp * 4 + i) * 64 + lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 d;
      d.x = __byte_perm(v[i].x, v[i].z, 0x5410);
      d.y = __byte_perm(v[i].x, v[i].z, 0x7632);
      d.z = __byte_perm(v[i].y, v[i].w, 0x5410);
      d.w = __byte_perm(v[i].y, v[i].w, 0x7632);
      shoal::put(tile, start + warp * 4 + i, lane, d);
    }
  }
}
"""

FINISH = r"""
// 8 dims of o from `dim` on: rotated back, perhaps cast with those of the other three lanes of a group of 32.
template <bool CAST, int FREQUENCIES>
__device__ __forceinline__ void shoal_finish_octet(uint4& v, int dim, const float* angles) {
  unsigned* words = reinterpret_cast<unsigned*>(&v);
  int frequency = (dim - (512 - 2 * FREQUENCIES)) >> 1;
  if (frequency >= 0) {
    float4 cosine = __ldg(reinterpret_cast<const float4*>(angles + frequency));
    float4 sine = __ldg(reinterpret_cast<const float4*>(angles + FREQUENCIES + frequency));
    const float* cs = reinterpret_cast<const float*>(&cosine);
    const float* sn = reinterpret_cast<const float*>(&sine);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float even = __uint_as_float(words[i] << 16), other = __uint_as_float(words[i] & 0xffff0000u);
      words[i] = shoal::pack2(
          __fadd_rn(__fmul_rn(even, cs[i]), __fmul_rn(other, sn[i])),
          __fadd_rn(__fmul_rn(other, cs[i]), -__fmul_rn(even, sn[i])));
    }
  }
  if (CAST) {
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most = fmaxf(most, fabsf(__uint_as_float(words[i] << 16)));
      most = fmaxf(most, fabsf(__uint_as_float(words[i] & 0xffff0000u)));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    // 2^ceil(log2(most / 448)): 448 is 1.75 * 2^8, so a mantissa above 1.75 carries into the exponent.
    unsigned exponent = ((__float_as_uint(most) + 0x001FFFFFu) & 0x7F800000u) - 0x04000000u;
    float scale = __uint_as_float(exponent), shrink = __uint_as_float(0x7F000000u - exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float even = __uint_as_float(words[i] << 16) * shrink;
      float other = __uint_as_float(words[i] & 0xffff0000u) * shrink;
      float2 back = shoal::round_e4m3(even, other);
      words[i] = shoal::pack2(back.x * scale, back.y * scale);
    }
  }
}

// Accumulators [64, COLUMNS] of a warpgroup -> o, rotated back, perhaps cast. `inverse` are the factors of two heads
// that this thread has, `first` is the first of the dims.
template <bool CAST, int FREQUENCIES, int COLUMNS>
__device__ __forceinline__ void shoal_finish_as(
    const float* acc, const float* inverse, const float* angles, __nv_bfloat16* out, int first) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, quad = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int head = warp * 16 + (lane >> 2) + half * 8;
#pragma unroll
    for (int group = 0; group < COLUMNS / 32; ++group) {
      unsigned r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = acc + (group * 4 + j) * 4 + half * 2;
        r[j] = shoal::pack2(pair[0] * inverse[half], pair[1] * inverse[half]);
      }
      // Transpose over the four lanes of a head: lane q gets the 8 dims of octet q.
      bool odd = quad & 1, upper = quad & 2;
      unsigned a = __shfl_xor_sync(0xffffffffu, odd ? r[0] : r[1], 1);
      unsigned b = __shfl_xor_sync(0xffffffffu, odd ? r[2] : r[3], 1);
      if (odd) { r[0] = a; r[2] = b; } else { r[1] = a; r[3] = b; }
      unsigned c = __shfl_xor_sync(0xffffffffu, upper ? r[0] : r[2], 2);
      unsigned d = __shfl_xor_sync(0xffffffffu, upper ? r[1] : r[3], 2);
      if (upper) { r[0] = c; r[1] = d; } else { r[2] = c; r[3] = d; }
      uint4 v;
      v.x = __byte_perm(r[0], r[1], 0x5410);
      v.y = __byte_perm(r[2], r[3], 0x5410);
      v.z = __byte_perm(r[0], r[1], 0x7632);
      v.w = __byte_perm(r[2], r[3], 0x7632);
      int dim = first + group * 32 + quad * 8;
      shoal_finish_octet<CAST, FREQUENCIES>(v, dim, angles);
      *reinterpret_cast<uint4*>(out + head * 512 + dim) = v;
    }
  }
}

// The same for o that 128 threads have stored without these steps.
template <bool CAST, int FREQUENCIES>
__device__ __forceinline__ void shoal_finish_stored(const float* angles, void* out) {
  uint4* octets = reinterpret_cast<uint4*>(out);
#pragma unroll 4
  for (int i = threadIdx.x & 127; i < 64 * 64; i += 128) {
    uint4 v = octets[i];
    shoal_finish_octet<CAST, FREQUENCIES>(v, (i & 63) * 8, angles);
    octets[i] = v;
  }
}
"""
