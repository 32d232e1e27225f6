// Behind hopper.cuh, for tiles of many rows: warp 0 of the last warpgroup copies weight words and scales to shared memory,
// warp 1 the rows; two warpgroups of two operands each, which fit the registers. A unit is 64 bytes of words for every
// row.

constexpr int TILES = 2, CONSUMERS = 256;
constexpr int UNIT_BYTES = 16384 + 2048, X_BYTES = BN * 128;
constexpr int W_RING = 0, X_RING = W_UNITS * UNIT_BYTES, PITCH = 528;
constexpr int STAGING = GATE_UP ? 2 * X_BYTES : BN * PITCH;
constexpr int X_END = X_RING + (X_UNITS * X_BYTES > STAGING ? X_UNITS * X_BYTES : STAGING);
constexpr int BARRIERS = X_END, AMAX = BARRIERS + 512, COLUMN = AMAX + 16 * BN * 4;

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
  u32 word_row, scale_row;  // this thread's place in a unit
  int warp, lane;
  bool is_first;
  uint2 fields[TILES][2];
  u32 a[TILES][8], b[TILES][8], left[2][TILES][8];
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
      for (int half = 0; half < 2; half++) {
        const u32 from = unit + word_row + (tile * TILE_ROWS + half * HALF_ROWS) * 64;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[tile][half]), "=r"(to[tile][2 + half]), "=r"(to[tile][4 + half]), "=r"(to[tile][6 + half])
                     : "r"(from) : "memory");
      }
      if (scales) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 from = unit + 16384 + scale_row + tile * TILE_ROWS * 8 + half * HALF_ROWS * 8;
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(fields[tile][half].x), "=r"(fields[tile][half].y) : "r"(from) : "memory");
        }
      }
    }
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
  template <int PLANE>
  __device__ __forceinline__ void multiply() {
    if constexpr (PLANE % 2 == 0) rows.wait();
    const u64 operand_b =
        (u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16) | (rows.data() + (PLANE & 1) * 64) >> 4 & 0x3FFF;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < BATCH; step++) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        wgmma(acc[tile], left[PLANE & 1][tile] + 4 * step, operand_b + 2 * step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    // The batch before is done, which was the last to read the unit before this one.
    if constexpr (PLANE % 2 == 0) {
      if (!is_first) release(rows, 1);
      is_first = false;
    }
    if constexpr (PLANE % 2 == 1) rows.next();
  }
  template <int PLANE, bool FP4>
  __device__ __forceinline__ void plane() {
    decode<PLANE, FP4>(left[PLANE & 1]);
    multiply<PLANE>();
  }
  template <bool FP4>
  __device__ __forceinline__ void run() {
    is_first = true;
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      load_words(a, true);
      if constexpr (FP4) load_words(b, false);
      // A unit is given back behind a product with its words: then every lane has them. Given back right behind the loads,
      // it was overwritten too early now and then (seen at 1,536 and 360 rows).
      plane<0, FP4>();
      release(words, FP4 ? 2 : 1);
      plane<1, FP4>();
      if constexpr (!FP4) load_words(a, false);
      plane<2, FP4>();
      if constexpr (FP4) {
#pragma unroll
        for (int i = 0; i < 8 * TILES; i++)
          a[i / 8][i % 8] = (a[i / 8][i % 8] & 0x0C180C18u) | ((b[i / 8][i % 8] << 2) & ~0x0C180C18u);
      }
      if constexpr (!FP4) release(words, 1);
      plane<3, FP4>();
      if constexpr (FP4) release(words, 1);
      if constexpr (!FP4) load_words(a, false);
      plane<4, FP4>();
      if constexpr (!FP4) release(words, 1);
      plane<5, FP4>();
      if constexpr (!FP4) load_words(a, false);
      plane<6, FP4>();
      if constexpr (!FP4) release(words, 1);
      plane<7, FP4>();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
};

// The roles of a block's threads.
struct Block {
  Ring word_ring, row_ring;
  __device__ Block(u32 base)
      : word_ring(base + BARRIERS, base + W_RING, W_UNITS, UNIT_BYTES),
        row_ring(base + BARRIERS + 16 * W_UNITS, base + X_RING, X_UNITS, X_BYTES) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < W_UNITS; i++) {
        barrier_init(word_ring.full + 8 * i, 1);
        barrier_init(word_ring.empty + 8 * i, CONSUMERS / 32);
      }
      for (int i = 0; i < X_UNITS; i++) {
        barrier_init(row_ring.full + 8 * i, 1);
        barrier_init(row_ring.empty + 8 * i, CONSUMERS / 32);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  __device__ __forceinline__ void copy(const char* x, int slot, int groups, const char* words, const char* scales,
                                       int units) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS) produce_words(word_ring, words, scales, units);
    if (threadIdx.x == CONSUMERS + 32) produce_rows(row_ring, x, slot, groups);
  }
  __device__ __forceinline__ Consumer consumer(const char*, int, int, const char*, const char*) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, place = warp / 4 * TILES;
    const int row = (GATE_UP ? place * 32 + (warp & 3) * 8 : place * 64 + (warp & 3) * 16) + lane / 4;
    Consumer c{word_ring, row_ring};
    c.lane = lane, c.warp = warp;
    c.word_row = row * 64 + (lane & 3) * 16;
    c.scale_row = row * 8;
    return c;
  }
};
