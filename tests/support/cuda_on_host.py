"""Compiles CUDA functions without inline assembly for the host: a warp is 32 threads, shuffles meet at a barrier."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

_SHIMS = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>
using std::max;
#define __device__
#define __forceinline__ inline
struct Place { int x; };
static thread_local Place threadIdx;
static thread_local Place blockIdx;
static Place gridDim;
struct int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
using std::min;
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
typedef uint16_t __nv_bfloat16;
static thread_local int first_warp;  // of the block
static std::barrier<>* warps[32];
static uint32_t slots[1024];

template <class To, class From> static To bits(From value) {
  To to;
  memcpy(&to, &value, sizeof to);
  return to;
}
template <class T> static T __ldg(const T* place) { return *place; }
static uint32_t __float_as_uint(float x) { return bits<uint32_t>(x); }
static float __uint_as_float(uint32_t x) { return bits<float>(x); }
static float __fdividef(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static int __popc(uint32_t x) { return __builtin_popcount(x); }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static uint32_t __shfl_sync(unsigned, uint32_t value, int lane) {
  int warp = first_warp + (threadIdx.x >> 5);
  slots[first_warp * 32 + threadIdx.x] = value;
  warps[warp]->arrive_and_wait();
  uint32_t result = slots[warp * 32 + lane];
  warps[warp]->arrive_and_wait();
  return result;
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int by) {
  return bits<T>(__shfl_sync(mask, bits<uint32_t>(value), (threadIdx.x & 31) ^ by));
}
static void __syncwarp() { warps[first_warp + (threadIdx.x >> 5)]->arrive_and_wait(); }
static uint32_t __ballot_sync(unsigned, bool mine) {
  int warp = first_warp + (threadIdx.x >> 5);
  slots[first_warp * 32 + threadIdx.x] = mine;
  warps[warp]->arrive_and_wait();
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= slots[warp * 32 + lane] << lane;
  warps[warp]->arrive_and_wait();
  return result;
}
static bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }

namespace shoal {
static uint32_t round_bf16(float x) {
  uint32_t u = bits<uint32_t>(x);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
static uint32_t pack2(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
static uint32_t mul2(uint32_t a, uint32_t b) {
  return pack2(bits<float>(a << 16) * bits<float>(b << 16),
               bits<float>(a & 0xFFFF0000u) * bits<float>(b & 0xFFFF0000u));
}
static float nearest_e4m3(float x) {
  float magnitude = fminf(fabsf(x), 448.0f);
  if (magnitude == 0) return x;
  float step = ldexpf(1.0f, std::max(ilogbf(magnitude), -6) - 3);
  return copysignf(nearbyintf(magnitude / step) * step, x);
}
static float2 round_e4m3(float low, float high) { return {nearest_e4m3(low), nearest_e4m3(high)}; }
static void ask(const void*) {}
}  // namespace shoal

static void cluster(int size, int first_block, int blocks, std::function<void()> body) {
  std::vector<std::thread> threads;
  for (auto& warp : warps) warp = new std::barrier<>(32);
  for (int i = 0; i < size * blocks; ++i)
    threads.emplace_back([=] {
      blockIdx.x = first_block + i / size;
      first_warp = i / size * (size / 32);
      threadIdx.x = i % size;
      body();
    });
  for (auto& thread : threads) thread.join();
  for (auto& warp : warps) delete warp;
}
static void warpgroup(std::function<void()> body) { cluster(128, 0, 1, body); }
"""


def compile_for_host(source: str, directory: Path) -> ctypes.CDLL:
    """A library of `source`, which may call `warpgroup(body)`: `body` in 128 threads, and
    `cluster(size, first, blocks, body)`: in all of some blocks. RuntimeError with g++'s words."""
    code, library = directory / "cuda.cpp", directory / "cuda.so"
    code.write_text(_SHIMS + source)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(code), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return ctypes.CDLL(str(library))
