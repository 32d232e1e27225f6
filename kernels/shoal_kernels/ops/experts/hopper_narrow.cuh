// Behind hopper.cuh, for tiles of few rows: four warpgroups of one operand each, words and scales straight from global
// memory to the registers that decode them, a lane's next words while it decodes the ones it has. Through shared memory
// they would take as much of its bandwidth as the rows, which every operand reads again. There are no warps beside those
// that multiply, so that each may have 128 registers: a lane of one copies the rows, a block of K at a time.

constexpr int TILES = 1, CONSUMERS = 512;
constexpr int UNIT = BN * 128, STAGE = 4 * UNIT;
constexpr int X_RING = 0, X_BYTES = UNIT, PITCH = 528;
constexpr int X_END = X_UNITS * STAGE;
constexpr int BARRIERS = X_END, AMAX = BARRIERS + 512, COLUMN = AMAX + 16 * BN * 4;
constexpr int HALF_ROWS = GATE_UP ? ROWS / 2 : 8, OWN_ROWS = GATE_UP ? 128 : 256;

// Loads that are left out if `more` is 0; the registers keep their place either way.
__device__ __forceinline__ void load16(u32* to, const char* from, u32 more) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0;\n@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "l"(from), "r"(more));
}
__device__ __forceinline__ void load8(uint2& to, const char* from, u32 more) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0;\n@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(to.x), "+r"(to.y) : "l"(from), "r"(more));
}

// Blocks that are copied ahead of the one in work: a stage is filled again two blocks after it was read.
constexpr int AHEAD = X_UNITS - 2;

__device__ __forceinline__ bool elected() {
  u32 yes;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(yes));
  return yes;
}

struct Consumer {
  Ring rows;
  const char *words, *scales;  // this lane's 16 bytes and 8 bytes of the block to load next
  const char* x;
  size_t x_unit;
  int warp, lane;
  bool is_first, rarely;
  uint2 fields[2], next_fields[2];
  u32 word[4][2][4], scale[2], left[2][BATCH][4];
  float acc[TILES][BN / 2];

  __device__ __forceinline__ void copy_rows(int block) {
    const int stage = block % X_UNITS, round = block / X_UNITS;
    barrier_wait(rows.empty + 8 * stage, (round & 1) ^ 1);
    barrier_expect(rows.full + 8 * stage, STAGE);
#pragma unroll
    for (int unit = 0; unit < 4; unit++)
      copy_in(rows.base + stage * STAGE + unit * UNIT, x + (block * 4 + unit) * x_unit, UNIT, rows.full + 8 * stage);
  }
  __device__ __forceinline__ void copy_ahead(int block) {
    if (block < BLOCKS && warp == 0 && elected()) copy_rows(block);
    __syncwarp();
  }
  // Columns t, t + 4, t + 8, t + 12 of a row are one chunk: an operand takes columns t and t + 4 of two rows.
  __device__ __forceinline__ void load_word(int to, int place, u32 more) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      load16(word[to][half], words + (place * ROWS + half * HALF_ROWS) * 64, more);
  }
  __device__ __forceinline__ void load_scales(u32 more) {
#pragma unroll
    for (int half = 0; half < 2; half++) load8(next_fields[half], scales + half * HALF_ROWS * 8, more);
    scales += ROWS * 8;
  }
  // Step S of 16 of K in a block: half of a plane of 32.
  template <int S, bool FP4>
  __device__ __forceinline__ void decode(u32* operand) {
    constexpr int PLANE = S / 2, FROM = S % 2 * 2;
    if constexpr (S % 2 == 0) scale[0] = multiplier<PLANE>(fields[0]), scale[1] = multiplier<PLANE>(fields[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int half = i & 1, at = FROM + i / 2;
      const u32 pair = FP4 ? fp4_pair<PLANE>(word[0][half][at], word[1][half][at], word[2][half][at])
                           : fp8_pair<PLANE & 1>(word[PLANE / 2][half][at]);
      operand[i] = times(pair, scale[half]);
    }
  }
  // S is the last step decoded, the batch ends with it.
  template <int S>
  __device__ __forceinline__ void multiply() {
    constexpr int INDEX = S / BATCH, FIRST = S - BATCH + 1;
    // Needed for the first batch only. The assembler looks at products between two branches together and, not seeing
    // that an operand is written while just the batches before are in flight, would else wait behind every product.
    if (INDEX == 0 || rarely) rows.wait();
    const u64 operand_b = ((u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16)) + (rows.data() >> 4);
    // Decoding between two products would make the assembler wait behind each of them.
#pragma unroll
    for (int i = 0; i < 4 * BATCH; i++) asm volatile("" : "+r"(left[INDEX % 2][i / 4][i % 4])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int place = FIRST + i;
      wgmma(acc[0], left[INDEX % 2][i], operand_b + place / 4 * (UNIT / 16) + place % 4 * 2);
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    // The batch before is done: with the first one of a block, the last to read the block before.
    if constexpr (INDEX == 0) {
      if (!is_first) release();
      is_first = false;
    }
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    const int stage = rows.stage == 0 ? rows.stages - 1 : rows.stage - 1;
    if (lane == 0) barrier_arrive(rows.empty + 8 * stage);
  }
  template <int S, bool FP4>
  __device__ __forceinline__ void step() {
    decode<S, FP4>(left[S / BATCH % 2][S % BATCH]);
    if constexpr (S % BATCH == BATCH - 1) multiply<S>();
  }
  template <int PLANE, bool FP4>
  __device__ __forceinline__ void plane() {
    step<2 * PLANE, FP4>();
    step<2 * PLANE + 1, FP4>();
  }
  template <bool FP4>
  __device__ __forceinline__ void run() {
    constexpr int UNITS = FP4 ? 2 : 4;
    is_first = true, rarely = x_unit == 0;
    load_scales(1);
#pragma unroll
    for (int i = 0; i < UNITS; i++) load_word(i, i, 1);
    if (warp == 0 && elected()) {
      if (!GATE_UP) grid_wait();
#pragma unroll 1
      for (int block = 0; block < AHEAD && block < BLOCKS; block++) copy_rows(block);
    }
    __syncwarp();
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      fields[0] = next_fields[0], fields[1] = next_fields[1];
      const u32 more = block + 1 < BLOCKS;
      words += UNITS * ROWS * 64;
      load_scales(more);
      copy_ahead(block + AHEAD);
      plane<0, FP4>();
      plane<1, FP4>();
      if constexpr (!FP4) load_word(0, 0, more);
      plane<2, FP4>();
      if constexpr (FP4) {
#pragma unroll
        for (int i = 0; i < 8; i++)
          word[2][i & 1][i / 2] = (word[0][i & 1][i / 2] & 0x0C180C18u) | ((word[1][i & 1][i / 2] << 2) & ~0x0C180C18u);
        load_word(0, 0, more);
      }
      plane<3, FP4>();
      if constexpr (!FP4) load_word(1, 1, more);
      plane<4, FP4>();
      plane<5, FP4>();
      load_word(FP4 ? 1 : 2, FP4 ? 1 : 2, more);
      plane<6, FP4>();
      plane<7, FP4>();
      if constexpr (!FP4) load_word(3, 3, more);
      rows.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
};

// The roles of a block's threads; words and scales are those of the expert in `units` words a block.
struct Block {
  Ring ring;
  __device__ Block(u32 base) : ring(base + BARRIERS, base + X_RING, X_UNITS, STAGE) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < X_UNITS; i++) {
        barrier_init(ring.full + 8 * i, 1);
        barrier_init(ring.empty + 8 * i, CONSUMERS / 32);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  __device__ __forceinline__ void copy(const char*, int, int, const char*, const char*, int) {}
  __device__ __forceinline__ Consumer consumer(const char* x, int slot, int groups, const char* words,
                                               const char* scales) {
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int row = blockIdx.x * OWN_ROWS + warp * (GATE_UP ? 8 : 16) + lane / 4;
    Consumer c{ring};
    c.lane = lane, c.warp = warp;
    c.x = x + (size_t)(slot / 8) * 1024, c.x_unit = (size_t)groups * 1024;
    c.words = words + (size_t)row * 64 + (lane & 3) * 16;
    c.scales = scales + (size_t)row * 8;
    return c;
  }
};
