// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(32) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, float rms_eps, float eps) {
  float m[24];
  float c[16];
  float square = float(0x0p+0f/*0.000000e+00*/);
  square = float(0x0p+0f/*0.000000e+00*/);
  for (int32_t s = 0; s < 20; ++s) {
    square = (square + ((__ubuf__ float*)buf_dyn_shmem)[(((s * 32) + ((int32_t)threadIdx.x)) + 40960)]);
  }
  float factor = (float(0x1p+0f/*1.000000e+00*/) / sqrtf(((square / float(0x1.4p+14f/*2.048000e+04*/)) + rms_eps)));
  #pragma unroll
  for (int32_t i = 0; i < 24; ++i) {
    m[i] = float(0x0p+0f/*0.000000e+00*/);
    for (int32_t s_1 = 0; s_1 < 20; ++s_1) {
      #pragma unroll
      for (int32_t part = 0; part < 2; ++part) {
        m[i] = (m[i] + ((__ubuf__ float*)buf_dyn_shmem)[((((s_1 * 2048) + (((int32_t)threadIdx.x) * 64)) + (i * 2)) + part)]);
      }
    }
    m[i] = (((m[i] * factor) * ((__ubuf__ float*)buf_dyn_shmem)[(min((i >> 2), 2) + 42392)]) + ((__ubuf__ float*)buf_dyn_shmem)[(i + 42368)]);
  }
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 4; ++i_1) {
    ((__ubuf__ float*)buf_dyn_shmem)[(((((int32_t)threadIdx.x) * 4) + i_1) + 42112)] = ((float(0x1p+0f/*1.000000e+00*/) / (float(0x1p+0f/*1.000000e+00*/) + expf((m[i_1] * float(-0x1p+0f/*-1.000000e+00*/))))) + eps);
    ((__ubuf__ float*)buf_dyn_shmem)[(((((int32_t)threadIdx.x) * 4) + i_1) + 42240)] = (float(0x1p+1f/*2.000000e+00*/) * (float(0x1p+0f/*1.000000e+00*/) / (float(0x1p+0f/*1.000000e+00*/) + expf((m[(i_1 + 4)] * float(-0x1p+0f/*-1.000000e+00*/))))));
  }
  #pragma unroll
  for (int32_t j = 0; j < 4; ++j) {
    float largest = max(max(m[((j * 4) + 8)], m[((j * 4) + 9)]), max(m[((j * 4) + 10)], m[((j * 4) + 11)]));
    #pragma unroll
    for (int32_t i_2 = 0; i_2 < 4; ++i_2) {
      c[((j * 4) + i_2)] = expf((m[(((j * 4) + i_2) + 8)] - largest));
    }
    float total = ((c[(j * 4)] + c[((j * 4) + 2)]) + (c[((j * 4) + 1)] + c[((j * 4) + 3)]));
    #pragma unroll
    for (int32_t i_3 = 0; i_3 < 4; ++i_3) {
      c[((j * 4) + i_3)] = (c[((j * 4) + i_3)] * (float(0x1p+0f/*1.000000e+00*/) / total));
    }
    #pragma unroll
    for (int32_t i_4 = 0; i_4 < 4; ++i_4) {
      c[((j * 4) + i_4)] = (c[((j * 4) + i_4)] + eps);
    }
  }
  #pragma unroll
  for (int32_t first = 0; first < 4; ++first) {
    float total_1 = (((c[first] + c[(first + 8)]) + (c[(first + 4)] + c[(first + 12)])) + eps);
    #pragma unroll
    for (int32_t i_5 = 0; i_5 < 4; ++i_5) {
      c[((i_5 * 4) + first)] = (c[((i_5 * 4) + first)] * (float(0x1p+0f/*1.000000e+00*/) / total_1));
    }
  }
  for (int32_t _ = 0; _ < 19; ++_) {
    #pragma unroll
    for (int32_t j_1 = 0; j_1 < 4; ++j_1) {
      float total_2 = (((c[(j_1 * 4)] + c[((j_1 * 4) + 2)]) + (c[((j_1 * 4) + 1)] + c[((j_1 * 4) + 3)])) + eps);
      #pragma unroll
      for (int32_t i_6 = 0; i_6 < 4; ++i_6) {
        c[((j_1 * 4) + i_6)] = (c[((j_1 * 4) + i_6)] * (float(0x1p+0f/*1.000000e+00*/) / total_2));
      }
    }
    #pragma unroll
    for (int32_t first_1 = 0; first_1 < 4; ++first_1) {
      float total_3 = (((c[first_1] + c[(first_1 + 8)]) + (c[(first_1 + 4)] + c[(first_1 + 12)])) + eps);
      #pragma unroll
      for (int32_t i_7 = 0; i_7 < 4; ++i_7) {
        c[((i_7 * 4) + first_1)] = (c[((i_7 * 4) + first_1)] * (float(0x1p+0f/*1.000000e+00*/) / total_3));
      }
    }
  }
  #pragma unroll
  for (int32_t i_8 = 0; i_8 < 16; ++i_8) {
    ((__ubuf__ float*)buf_dyn_shmem)[(((((int32_t)threadIdx.x) * 16) + i_8) + 41600)] = c[i_8];
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ float* P, __gm__ float* Q, __gm__ float* base, __gm__ float* comb, __gm__ float* post, __gm__ float* pre, __gm__ float* scale, float eps, float rms_eps, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[42392]))), (__gm__ uint8_t*)((&(scale[0]))), 1, 12, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 12, 12);
  asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[42368]))), (__gm__ uint8_t*)((&(base[0]))), 1, 96, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 96, 96);
  asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(1));
  asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(1));
  for (int32_t turn = 0; turn < (((((rows + 31) >> 5) + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[40960]))), (__gm__ uint8_t*)((&(Q[((((int64_t)turn) * (int64_t)2048) + (((int64_t)((int32_t)block_idx)) * (int64_t)32))]))), 20, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4), 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), (rows * 4), 128);
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[0]))), (__gm__ uint8_t*)((&(P[((((int64_t)turn) * (int64_t)131072) + (((int64_t)((int32_t)block_idx)) * (int64_t)2048))]))), 20, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 256), 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), (rows * 256), 8192);
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(32), buf_dyn_shmem, rms_eps, eps);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(pre[((((int64_t)turn) * (int64_t)8192) + (((int64_t)((int32_t)block_idx)) * (int64_t)128))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[42112]))), 1, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16), static_cast<asc_store_l2_cache_mode>(4), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(comb[((((int64_t)turn) * (int64_t)32768) + (((int64_t)((int32_t)block_idx)) * (int64_t)512))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[41600]))), 1, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 64), static_cast<asc_store_l2_cache_mode>(4), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 64), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 64));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(post[((((int64_t)turn) * (int64_t)8192) + (((int64_t)((int32_t)block_idx)) * (int64_t)128))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[42240]))), 1, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16), static_cast<asc_store_l2_cache_mode>(4), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 16));
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
}
