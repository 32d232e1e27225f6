"""The arg-max over a tile of logits in the registers of wgmma, for the TileLang head.

The arithmetic is that of `ops/sampling/noise_triton.py`, operation for operation; see there for what the fast noise is
and why the second look is needed. A lane holds two neighbouring tokens of every eight, of two rows; one block of Philox
makes four, so lanes 2q and 2q + 1 make one block each for two eights and exchange halves.
"""

from shoal_kernels.ops.sampling import noise

_LOG_SERIES = ", ".join(repr(c) for c in noise.LOG_SERIES)

SOURCE = r"""
__device__ __forceinline__ void shoal_round(unsigned* c, unsigned k0, unsigned k1) {
  const unsigned long long p0 = (unsigned long long)c[0] * M0, p1 = (unsigned long long)c[2] * M1;
  c[0] = (unsigned)(p1 >> 32) ^ c[1] ^ k0;
  c[2] = (unsigned)(p0 >> 32) ^ c[3] ^ k1;
  c[1] = (unsigned)p1;
  c[3] = (unsigned)p0;
}

// Rolled up: it is seldom needed, but stands in many places.
__device__ __forceinline__ void shoal_philox(unsigned block, unsigned low, unsigned high, unsigned k0, unsigned k1,
                                             unsigned* c) {
  c[0] = block, c[1] = low, c[2] = high, c[3] = DOMAIN;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) shoal_round(c, k0 + round * W0, k1 + round * W1);
}

__device__ __forceinline__ float shoal_log2(float x) {
#ifdef __CUDACC__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

// lg2 of the exponential behind word h: the fast noise is -ln 2 times this.
__device__ __forceinline__ float shoal_fast(unsigned h) {
  const bool small = h < 0x20000000u;
  const float t = __fmul_rn(__fadd_rn(__uint2float_rn(small ? h : ~h), 0.5f), 2.3283064365386963e-10f);
  float p = __fmaf_rn(t, 0.16666667f, 0.2f);
  p = __fmaf_rn(p, t, 0.25f);
  p = __fmaf_rn(p, t, 0.33333334f);
  p = __fmaf_rn(p, t, 0.5f);
  p = __fmaf_rn(p, t, 1.0f);
  return shoal_log2(small ? __fmul_rn(p, t) : __fmul_rn(shoal_log2(t), -0.6931471805599453f));
}

__device__ __forceinline__ double shoal_log64(double x) {
  const double series[7] = { SERIES};
  const long long bits = __double_as_longlong(x);
  double e = (double)(int)((bits >> 52) - 1022);
  const double m = __longlong_as_double((bits & 0x000FFFFFFFFFFFFFll) | 0x3FE0000000000000ll);
  const bool small = m < SQRT_HALF;
  e = small ? __dadd_rn(e, -1.0) : e;
  const double f = small ? __dadd_rn(__dadd_rn(m, m), -1.0) : __dadd_rn(m, -1.0);
  const double s = __ddiv_rn(f, __dadd_rn(2.0, f)), z = __dmul_rn(s, s);
  double r = series[6];
#pragma unroll
  for (int i = 5; i >= 0; --i) r = __dadd_rn(__dmul_rn(r, z), series[i]);
  r = __dmul_rn(r, z);
  const double half = __dmul_rn(__dmul_rn(f, f), 0.5);
  const double inner = __dadd_rn(__dmul_rn(s, __dadd_rn(half, r)), __dmul_rn(e, LN2_LOW));
  return __dadd_rn(__dmul_rn(e, LN2_HIGH), -__dadd_rn(__dadd_rn(half, -inner), -f));
}

__device__ __forceinline__ float shoal_exact(unsigned h) {
  const double u = __dmul_rn(__dadd_rn((double)h, 0.5), 2.3283064365386963e-10);
  return __double2float_rn(-shoal_log64(-shoal_log64(__dadd_rn(1.0, -u))));
}

struct ShoalRow {
  unsigned low, high, k0, k1;
  float inverse, factor;  // factor: -ln 2, or 0 for a row without noise
};

struct ShoalBest {
  float score, logit, second;
  int token;
};

__device__ __forceinline__ void shoal_look(ShoalBest& best, float score, float logit, int token) {
  const bool wins = score > best.score;
  best.second = fmaxf(best.second, fminf(score, best.score));
  best.logit = wins ? logit : best.logit;
  best.token = wins ? token : best.token;
  best.score = fmaxf(score, best.score);
}

// The words of a lane's four tokens (two of each of two eights) of both rows, for two such pairs of eights at a time:
// four generators run in step, because one alone would wait for itself.
__device__ __forceinline__ void shoal_words(unsigned block, const ShoalRow* rows, unsigned h[2][2][4]) {
  const bool odd = threadIdx.x & 1;
  unsigned c[2][2][4];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c[pair][i][0] = block + pair * 4, c[pair][i][1] = rows[i].low, c[pair][i][2] = rows[i].high;
      c[pair][i][3] = DOMAIN;
    }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shoal_round(c[pair][i], rows[i].k0 + round * W0, rows[i].k1 + round * W1);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned* w = c[pair][i];
      const unsigned r0 = __shfl_xor_sync(0xffffffffu, odd ? w[0] : w[2], 1);
      const unsigned r1 = __shfl_xor_sync(0xffffffffu, odd ? w[1] : w[3], 1);
      h[pair][i][0] = odd ? r0 : w[0], h[pair][i][1] = odd ? r1 : w[1];
      h[pair][i][2] = odd ? w[2] : r0, h[pair][i][3] = odd ? w[3] : r1;
    }
}

// The largest noise of each four tokens of a lane, for the 32 tokens of a part of a tile: [2 pairs of eights][2 rows].
// This is what the warps do while the tensor cores work on the logits.
__device__ __forceinline__ void shoal_noise(const float* parameters, int first, int part, float* most) {
  const ShoalRow* rows = reinterpret_cast<const ShoalRow*>(parameters);
  const unsigned block = (unsigned)(first + ((threadIdx.x & 1) * 8 + (threadIdx.x & 2) * 2)) >> 2;
  unsigned h[2][2][4];
  shoal_words(block + part * 8, rows, h);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned* w = h[pair][i];
      const unsigned least = min(min(w[0], w[1]), min(w[2], w[3]));
      most[pair * 2 + i] = __fmul_rn(shoal_fast(least), rows[i].factor);
    }
}

// One look at a lane's N / 4 logits of two rows, past what was `seen`; token counts from the lane's first. Four tokens
// are skipped whose largest logit with their largest noise stays below `bound` or the best so far; not when looking
// again.
template <int N>
__device__ __forceinline__ void shoal_pass(const float* sums, int first, const ShoalRow* rows, const float* most,
                                           const ShoalBest* seen, bool again, const float* bound, ShoalBest* best) {
  const unsigned block = (unsigned)(first + (threadIdx.x & 2) * 2) >> 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    best[i].score = best[i].logit = best[i].second = -INFINITY;
    best[i].token = 0;
  }
#pragma unroll
  for (int four = 0; four < N / 16; ++four) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* z = sums + four * 8 + i * 2;
      const float top = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[4], z[5])) * rows[i].inverse + most[four * 2 + i];
      const float reach = top + (1.0e-4f + fabsf(top) * 9.5367431640625e-07f);
      if (reach < fmaxf(bound[i], best[i].score) && !again) continue;
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        unsigned c[4];
        shoal_philox(block + four * 4 + eight * 2, rows[i].low, rows[i].high, rows[i].k0, rows[i].k1, c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned h = (threadIdx.x & 1) ? c[2 + j] : c[j];
          const float logit = __fmul_rn(z[eight * 4 + j], rows[i].inverse);
          const float score = __fadd_rn(logit, __fmul_rn(shoal_fast(h), rows[i].factor));
          const int token = four * 16 + eight * 8 + j;
          const bool later = score < seen[i].score || (score == seen[i].score && token > seen[i].token);
          shoal_look(best[i], later ? score : -INFINITY, logit, token);
        }
      }
    }
  }
}

// What the rows of a lane need, 12 words: two ShoalRow. bound: nothing is known of new rows.
__device__ __forceinline__ void shoal_rows(const float* inverse_temperature, const int64_t* seeds,
                                           const int64_t* positions, const unsigned char* is_greedy, int first_row,
                                           int rows, float* parameters, float* bound) {
  ShoalRow* row = reinterpret_cast<ShoalRow*>(parameters);
  first_row += (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = min(first_row + i * 8, rows - 1);
    const unsigned long long seed = seeds[at], position = positions[at];
    const bool greedy = is_greedy[at];
    row[i].low = (unsigned)position, row[i].high = (unsigned)(position >> 32);
    row[i].k0 = (unsigned)seed, row[i].k1 = (unsigned)(seed >> 32);
    row[i].inverse = greedy ? 1.0f : inverse_temperature[at];
    row[i].factor = greedy ? 0.0f : -0.6931471805599453f;
    bound[i] = -INFINITY;
  }
}

// The best of the four lanes that share a row; tokens become ids.
__device__ __forceinline__ void shoal_merge(ShoalBest& best, int first) {
  best.token += first + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    ShoalBest other;
    other.score = __shfl_xor_sync(0xffffffffu, best.score, step);
    other.logit = __shfl_xor_sync(0xffffffffu, best.logit, step);
    other.second = __shfl_xor_sync(0xffffffffu, best.second, step);
    other.token = __shfl_xor_sync(0xffffffffu, best.token, step);
    const bool wins = other.score > best.score || (other.score == best.score && other.token < best.token);
    best.second = fmaxf(fmaxf(best.second, other.second), fminf(best.score, other.score));
    best.score = wins ? other.score : best.score;
    best.logit = wins ? other.logit : best.logit;
    best.token = wins ? other.token : best.token;
  }
}

// Exact values of the best of both rows; lane 0 of four works on the first, lane 1 on the second.
__device__ __forceinline__ void shoal_values(const ShoalRow* rows, const ShoalBest* best, float* values) {
  const int i = threadIdx.x & 1;
  const ShoalRow row = i ? rows[1] : rows[0];
  const int token = i ? best[1].token : best[0].token;
  unsigned c[4];
  shoal_philox((unsigned)token >> 2, row.low, row.high, row.k0, row.k1, c);
  const unsigned h = (token & 2) ? ((token & 1) ? c[3] : c[2]) : ((token & 1) ? c[1] : c[0]);
  const float logit = i ? best[1].logit : best[0].logit;
  const float value = row.factor != 0.0f ? __fadd_rn(logit, shoal_exact(h)) : logit;  // -inf where nothing was found
  const float other = __shfl_xor_sync(0xffffffffu, value, 1);
  values[0] = i ? other : value;
  values[1] = i ? value : other;
}

__device__ __forceinline__ bool shoal_may_win(float second, float value, float factor) {
  return factor != 0.0f && second > -INFINITY && second + (4.0e-5f + fabsf(second) * 4.76837158203125e-07f) >= value;
}

// The best token of each row of a tile of N tokens whose logits lie in wgmma's accumulators. most: of `shoal_noise`.
// bound: values that a lane's two rows have reached in tiles before, raised by this one; a row that stays below has no
// best here.
template <int N>
__device__ __forceinline__ void shoal_choose(float* sums, const float* parameters, const float* most, float* values,
                                             int* tokens, int first_row, int rows, int first, int vocab, int part,
                                             int parts, float* bound) {
  const int lane = threadIdx.x & 31;
  ShoalRow row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) row[i] = reinterpret_cast<const ShoalRow*>(parameters)[i];
  first_row += (threadIdx.x >> 5 & 3) * 16 + lane / 4;
  if (first + N > vocab) {
#pragma unroll
    for (int j = 0; j < N / 2; ++j)
      if (first + j / 4 * 8 + (lane & 3) * 2 + j % 2 >= vocab) sums[j] = -INFINITY;
  }
  ShoalBest seen[2], best[2];
  float value[2];
  int token[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    seen[i].score = INFINITY, seen[i].token = -1;
    value[i] = -INFINITY, token[i] = 0x7fffffff;
  }
  for (bool again = false, more = true; more; again = true) {
    // The compiler must not make the noise of all tokens before it knows which are needed.
    asm volatile("" : "+r"(row[0].k0), "+r"(row[0].k1), "+r"(row[1].k0), "+r"(row[1].k1));
    shoal_pass<N>(sums, first, row, most, seen, again, bound, best);
    shoal_merge(best[0], first);
    shoal_merge(best[1], first);
    float exact[2];
    shoal_values(row, best, exact);
    more = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool counts = best[i].score > -INFINITY && (row[i].factor != 0.0f || !again);
      const bool better = counts && (exact[i] > value[i] || (exact[i] == value[i] && best[i].token < token[i]));
      value[i] = better ? exact[i] : value[i];
      token[i] = better ? best[i].token : token[i];
      more = more || shoal_may_win(best[i].second, value[i], row[i].factor);
      seen[i].score = best[i].score, seen[i].token = best[i].token - first - (lane & 3) * 2;
    }
    more = __any_sync(0xffffffffu, more);
  }
  bound[0] = fmaxf(bound[0], value[0]), bound[1] = fmaxf(bound[1], value[1]);
  if ((lane & 3) < 2) {
    const int i = lane & 1, at = first_row + i * 8;
    if (at < rows) {
      values[(long long)at * parts + part] = i ? value[1] : value[0];
      tokens[(long long)at * parts + part] = i ? token[1] : token[0];
    }
  }
}
"""
for _name, _value in (
    ("DOMAIN", f"{noise.TOKEN_DOMAIN}u"),
    ("ROUNDS", str(noise.ROUNDS)),
    ("M0", f"{noise.MULTIPLIER_0}ull"),
    ("M1", f"{noise.MULTIPLIER_1}ull"),
    ("W0", f"{noise.WEYL_0}u"),
    ("W1", f"{noise.WEYL_1}u"),
    ("SERIES", _LOG_SERIES),
    ("SQRT_HALF", repr(noise.SQRT_HALF_64)),
    ("LN2_HIGH", repr(noise.LN2_HIGH_64)),
    ("LN2_LOW", repr(noise.LN2_LOW_64)),
):
    SOURCE = f"#define SHOAL_{_name} {_value}\n" + SOURCE.replace(f" {_name}", f" SHOAL_{_name}")
