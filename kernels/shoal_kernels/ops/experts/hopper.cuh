// One product of the experts on Hopper: out^T = W x^T for a tile of 256 weight rows and BN rows of one expert.
//
// Warp 0 of the last warpgroup copies weight words and scales to shared memory, warp 1 the rows; GROUPS warpgroups
// decode words in registers and multiply. The 256 rows are four operands of 64, each made of 16 rows a warp; for gate
// and up these are 8 rows of gate above 8 of up, so that a thread holds both of an output. A warp that multiplies from
// registers waits until the tensor core has taken them: with few columns four warpgroups of one operand each keep it
// busy, with many columns two warpgroups of two operands fit the registers.
//
// The text in front of this file defines BN (columns), BLOCKS (K / 256), ROWS (rows of the weight), GATE_UP (1: 128
// rows of gate and 128 of up, the epilogue applies the activation; 0: 256 rows of down), GROUPS, STEP (planes a batch of
// multiplications), W_UNITS, X_UNITS (stages) and the function wgmma.
//
// Layouts: rows in tiles [K / 64][slots / 8][8][64] of bfloat16, 16-byte chunk c of row r at c ^ (r % 8), which is what
// a 128-byte swizzled operand wants; words and scales as in `packing`. A unit is 64 bytes of words for every row.

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr int TILES = 4 / GROUPS, CONSUMERS = GROUPS * 128;
constexpr int UNIT_BYTES = 16384 + 2048, X_BYTES = BN * 128;
constexpr int W_RING = 0, X_RING = W_UNITS * UNIT_BYTES, PITCH = 528;
constexpr int STAGING = GATE_UP ? 2 * X_BYTES : BN * PITCH;
constexpr int X_END = X_RING + (X_UNITS * X_BYTES > STAGING ? X_UNITS * X_BYTES : STAGING);
constexpr int BARRIERS = X_END, AMAX = BARRIERS + 512, COLUMN = AMAX + 16 * BN * 4;
constexpr u32 FP4_MASK = 0x81C081C0u;

__device__ __forceinline__ u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const void* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void copy_out(void* to, u32 from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copies_out_done() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void load_matrices(u32* r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ u32 times(u32 pair, u32 scale) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(scale));
  return pair;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ float rounded(float x) { return __uint_as_float((pack_bf16(x, x) & 0xFFFFu) << 16); }
__device__ __forceinline__ u32 turned(u32 x, int bits) { return __funnelshift_r(x, x, bits); }

// Work of this grid that does not need the results of the one before may be done ahead of grid_wait.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Byte PLANE of 8 exponent fields as a pair of equal bfloat16 powers of two.
template <int PLANE>
__device__ __forceinline__ u32 multiplier(uint2 fields) {
  constexpr u32 place = PLANE & 3;
  return __byte_perm(PLANE < 4 ? fields.x : fields.y, 0, 0x4040 | place | (place << 8)) << 7;
}

template <int PLANE>
__device__ __forceinline__ u32 fp4_pair(u32 a, u32 b, u32 rest) {
  if constexpr (PLANE == 6) return turned(rest, 4) & FP4_MASK;
  if constexpr (PLANE == 7) return (rest << 2) & FP4_MASK;
  const u32 word = PLANE < 3 ? a : b;
  if constexpr (PLANE % 3 == 0) return word & FP4_MASK;
  if constexpr (PLANE % 3 == 1) return turned(word, 6) & FP4_MASK;
  return (word << 6) & FP4_MASK;
}

template <int ODD>
__device__ __forceinline__ u32 fp8_pair(u32 word) {
  if constexpr (ODD) return (turned(word, 4) & 0x87808780u) | ((word << 4) & 0x00700070u);
  return word & 0x87F087F0u;
}

struct Ring {
  u32 full, empty, base;
  int stages, bytes, stage;
  u32 parity;
  __device__ Ring(u32 bars, u32 base, int stages, int bytes)
      : full(bars), empty(bars + 8 * stages), base(base), stages(stages), bytes(bytes), stage(0), parity(0) {}
  __device__ __forceinline__ u32 data() const { return base + stage * bytes; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ u32 acquire() {
    barrier_wait(empty + 8 * stage, parity ^ 1);
    return full + 8 * stage;
  }
  __device__ __forceinline__ void wait() { barrier_wait(full + 8 * stage, parity); }
};

// What the two copying threads do; words come 2 (FP4) or 4 (FP8) units a block, scales with the first of them.
__device__ __forceinline__ void produce_words(Ring ring, const char* words, const char* scales, int units) {
  const int first = blockIdx.x * (GATE_UP ? 128 : 256);
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) {
      const u32 full = ring.acquire(), to = ring.data();
      barrier_expect(full, unit == 0 ? UNIT_BYTES : 16384);
      const char* from = words + ((size_t)(block * units + unit) * ROWS + first) * 64;
      const char* scale = scales + ((size_t)block * ROWS + first) * 8;
      if (GATE_UP) {
        copy_in(to, from, 8192, full);
        copy_in(to + 8192, from + (size_t)(ROWS / 2) * 64, 8192, full);
        if (unit == 0) {
          copy_in(to + 16384, scale, 1024, full);
          copy_in(to + 17408, scale + (size_t)(ROWS / 2) * 8, 1024, full);
        }
      } else {
        copy_in(to, from, 16384, full);
        if (unit == 0) copy_in(to + 16384, scale, 2048, full);
      }
      ring.next();
    }
  }
}

__device__ __forceinline__ void produce_rows(Ring ring, const char* x, int slot, int groups) {
  if (!GATE_UP) grid_wait();
#pragma unroll 1
  for (int unit = 0; unit < BLOCKS * 4; unit++) {
    const u32 full = ring.acquire();
    barrier_expect(full, X_BYTES);
    copy_in(ring.data(), x + ((size_t)unit * groups + slot / 8) * 1024, X_BYTES, full);
    ring.next();
  }
}

struct Consumer {
  Ring words, rows;
  u32 word_row, scale_row;  // this thread's place in a unit: for ldmatrix, for scales
  int warp, lane;
  bool is_first;
  uint2 fields[TILES][2];
  u32 a[TILES][8], b[TILES][8], left[2][STEP][TILES][8];
  float acc[TILES][BN / 2];

  __device__ __forceinline__ void release(Ring& ring, int behind) {
    __syncwarp();
    int stage = ring.stage - behind;
    if (stage < 0) stage += ring.stages;
    if (lane == 0) barrier_arrive(ring.empty + 8 * stage);
  }
  __device__ __forceinline__ void load_words(u32 (*to)[8], bool scales) {
    constexpr int HALF_ROWS = GATE_UP ? 128 : 8, TILE_ROWS = GATE_UP ? 32 : 64;
    words.wait();
    const u32 unit = words.data();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int step = 0; step < 2; step++)
        load_matrices(to[tile] + 4 * step, (unit + tile * TILE_ROWS * 64 + word_row) ^ (step * 32));
      if (scales) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 from = unit + 16384 + scale_row + tile * TILE_ROWS * 8 + half * HALF_ROWS * 8;
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(fields[tile][half].x), "=r"(fields[tile][half].y) : "r"(from) : "memory");
        }
      }
    }
    release(words, 0);
    words.next();
  }
  template <int PLANE, bool FP4>
  __device__ __forceinline__ void decode(u32 (*operand)[8]) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const u32 scale[2] = {multiplier<PLANE>(fields[tile][0]), multiplier<PLANE>(fields[tile][1])};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32 word = a[tile][i], pair = FP4 ? fp4_pair<PLANE>(word, b[tile][i], word) : fp8_pair<PLANE & 1>(word);
        operand[tile][i] = times(pair, scale[i & 1]);
      }
    }
  }
  // PLANE is the last plane decoded, the batch ends with it.
  template <int PLANE>
  __device__ __forceinline__ void multiply() {
    constexpr int FIRST = PLANE - STEP + 1;
    if constexpr (FIRST % 2 == 0) rows.wait();
    const u64 operand_b =
        (u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16) | (rows.data() + (FIRST & 1) * 64) >> 4 & 0x3FFF;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 2 * STEP; step++) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        wgmma(acc[tile], left[PLANE / STEP & 1][step / 2][tile] + 4 * (step & 1), operand_b + 2 * step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    // The batch before is done, which was the last to read the unit before this one.
    if constexpr (FIRST % 2 == 0) {
      if (!is_first) release(rows, 1);
      is_first = false;
    }
    if constexpr (PLANE % 2 == 1) rows.next();
  }
  template <int PLANE, bool FP4>
  __device__ __forceinline__ void plane() {
    decode<PLANE, FP4>(left[PLANE / STEP & 1][PLANE % STEP]);
    if constexpr (PLANE % STEP == STEP - 1) multiply<PLANE>();
  }
  template <bool FP4>
  __device__ __forceinline__ void run() {
    is_first = true;
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      load_words(a, true);
      if constexpr (FP4) load_words(b, false);
      plane<0, FP4>();
      plane<1, FP4>();
      if constexpr (!FP4) load_words(a, false);
      plane<2, FP4>();
      if constexpr (FP4) {
#pragma unroll
        for (int i = 0; i < 8 * TILES; i++)
          a[i / 8][i % 8] = (a[i / 8][i % 8] & 0x0C180C18u) | ((b[i / 8][i % 8] << 2) & ~0x0C180C18u);
      }
      plane<3, FP4>();
      if constexpr (!FP4) load_words(a, false);
      plane<4, FP4>();
      plane<5, FP4>();
      if constexpr (!FP4) load_words(a, false);
      plane<6, FP4>();
      plane<7, FP4>();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
};
