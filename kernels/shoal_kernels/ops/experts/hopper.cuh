// One product of the experts on Hopper: out^T = W x^T for a tile of 256 weight rows and BN rows of one expert.
//
// Warpgroups decode words in registers and multiply. The 256 rows are four operands of 64, each made of 16 rows a warp;
// for gate and up these are 8 rows of gate above 8 of up, so that a thread holds both of an output. A warp that
// multiplies from registers waits until the tensor core has taken them: with few columns four warpgroups of one operand
// each keep it busy (hopper_narrow.cuh), with many columns two of two operands fit the registers (hopper_wide.cuh).
//
// The text in front of this file defines BN (columns), BLOCKS (K / 256), ROWS (rows of the weight), GATE_UP (1: 128
// rows of gate and 128 of up, the epilogue applies the activation; 0: 256 rows of down), BATCH (steps of 16 of K that are
// multiplied at once), W_UNITS, X_UNITS (stages) and the function wgmma.
//
// Layouts: rows in tiles [K / 64][slots / 8][8][64] of bfloat16, 16-byte chunk c of row r at c ^ (r % 8), which is what
// a 128-byte swizzled operand wants; words and scales as in `packing`.

typedef unsigned long long u64;
typedef unsigned int u32;

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
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}
// Both of a pair times the lower half of `scale`.
__device__ __forceinline__ u32 times(u32 pair, u32 scale) {
  asm("{.reg .b16 l, h;\n.reg .b32 both;\nmov.b32 {l, h}, %1;\nmov.b32 both, {l, l};\nmul.rn.bf16x2 %0, %0, both;\n}"
      : "+r"(pair) : "r"(scale));
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

// Byte PLANE of 8 exponent fields as a bfloat16 power of two.
template <int PLANE>
__device__ __forceinline__ u32 multiplier(uint2 fields) {
  u32 out;
  asm("dp4a.u32.u32 %0, %1, %2, 0;" : "=r"(out) : "r"(PLANE < 4 ? fields.x : fields.y), "n"(0x80 << 8 * (PLANE & 3)));
  return out;
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

