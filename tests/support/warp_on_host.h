// A warp of CUDA on the host: 32 threads that meet at every shuffle and vote. Enough for the sources that TileLang
// kernels include, so that they are tested without a GPU. Compile without contraction of multiply and add.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

using std::max;
using std::min;
#define __device__
#define __forceinline__ inline

struct ThreadIndex {
  unsigned x;
};
static thread_local ThreadIndex threadIdx;
static pthread_barrier_t warp_barrier;
static unsigned warp_words[32];

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) == 4);
  const unsigned lane = threadIdx.x & 31;
  std::memcpy(&warp_words[lane], &value, 4);
  pthread_barrier_wait(&warp_barrier);
  T other;
  std::memcpy(&other, &warp_words[lane ^ mask], 4);
  pthread_barrier_wait(&warp_barrier);
  return other;
}

inline bool __any_sync(unsigned, bool value) {
  warp_words[threadIdx.x & 31] = value;
  pthread_barrier_wait(&warp_barrier);
  bool any = false;
  for (unsigned word : warp_words) any = any || word;
  pthread_barrier_wait(&warp_barrier);
  return any;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __uint2float_rn(unsigned a) { return (float)a; }
inline float __double2float_rn(double a) { return (float)a; }

inline long long __double_as_longlong(double a) {
  long long bits;
  std::memcpy(&bits, &a, 8);
  return bits;
}

inline double __longlong_as_double(long long bits) {
  double a;
  std::memcpy(&a, &bits, 8);
  return a;
}

inline void run_warp(const std::function<void()>& lane) {
  pthread_barrier_init(&warp_barrier, nullptr, 32);
  std::vector<std::thread> lanes;
  for (unsigned i = 0; i < 32; ++i)
    lanes.emplace_back([&lane, i] {
      threadIdx.x = i;
      lane();
    });
  for (auto& one : lanes) one.join();
}
