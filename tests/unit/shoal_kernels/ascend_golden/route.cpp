// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(128) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem) {
  float left[3];
  int32_t tied[3];
  float best[1];
  int32_t winner[1];
  #pragma unroll
  for (int32_t i = 0; i < 3; ++i) {
    float x = ((__ubuf__ float*)buf_dyn_shmem)[((i * 128) + ((int32_t)threadIdx.x))];
    ((__ubuf__ float*)buf_dyn_shmem)[(((i * 128) + ((int32_t)threadIdx.x)) + 768)] = sqrtf((max(x, float(0x0p+0f/*0.000000e+00*/)) + log1pf(expf((fabsf(x) * float(-0x1p+0f/*-1.000000e+00*/))))));
    left[i] = (sqrtf((max(x, float(0x0p+0f/*0.000000e+00*/)) + log1pf(expf((fabsf(x) * float(-0x1p+0f/*-1.000000e+00*/)))))) + ((__ubuf__ float*)buf_dyn_shmem)[(((i * 128) + ((int32_t)threadIdx.x)) + 384)]);
  }
  for (int32_t place = 0; place < 6; ++place) {
    best[0] = tl::limits::kFloatNInf;
    #pragma unroll
    for (int32_t rv = 0; rv < 3; ++rv) {
      best[0] = max(best[0], left[rv]);
    }
    asc_syncthreads();
    best[0] = tl::AscendAllReduce<tl::MaxOp, 128, 1, 0>::run(best[0], (&(((__ubuf__ float*)buf_dyn_shmem)[1152])));
    #pragma unroll
    for (int32_t i_1 = 0; i_1 < 3; ++i_1) {
      int32_t condval;
      if ((left[i_1] == best[0])) {
        condval = ((i_1 * 128) + ((int32_t)threadIdx.x));
      } else {
        condval = 384;
      }
      tied[i_1] = condval;
    }
    winner[0] = 2147483647;
    #pragma unroll
    for (int32_t rv_1 = 0; rv_1 < 3; ++rv_1) {
      winner[0] = min(winner[0], tied[rv_1]);
    }
    winner[0] = tl::AscendAllReduce<tl::MinOp, 128, 1, 0>::run(winner[0], (&(((__ubuf__ int32_t*)buf_dyn_shmem)[1280])));
    #pragma unroll
    for (int32_t i_2 = 0; i_2 < 3; ++i_2) {
      float condval_1;
      if ((((i_2 * 128) + ((int32_t)threadIdx.x)) == winner[0])) {
        condval_1 = tl::limits::kFloatNInf;
      } else {
        condval_1 = left[i_2];
      }
      left[i_2] = condval_1;
    }
    if (((int32_t)threadIdx.x) == 0) {
      ((__ubuf__ int32_t*)buf_dyn_shmem)[(place + 1408)] = winner[0];
    }
  }
}

__simt_vf__ __launch_bounds__(32) inline void main_kernel_simt_vf_1(__ubuf__ uint8_t* buf_dyn_shmem, float scale) {
  float total = float(0x0p+0f/*0.000000e+00*/);
  if (((int32_t)threadIdx.x) < 1) {
    total = float(0x0p+0f/*0.000000e+00*/);
    for (int32_t place = 0; place < 6; ++place) {
      total = (total + ((__ubuf__ float*)buf_dyn_shmem)[(((__ubuf__ int32_t*)buf_dyn_shmem)[(((int64_t)place) + (int64_t)1408)] + 768)]);
    }
    for (int32_t place_1 = 0; place_1 < 6; ++place_1) {
      ((__ubuf__ float*)buf_dyn_shmem)[(place_1 + 1416)] = ((((__ubuf__ float*)buf_dyn_shmem)[(((__ubuf__ int32_t*)buf_dyn_shmem)[(((int64_t)place_1) + (int64_t)1408)] + 768)] / (total + float(0x1.79ca10c924223p-67f/*1.000000e-20*/))) * scale);
    }
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ float* B, __gm__ float* L, __gm__ int32_t* ids, __gm__ float* weights, int32_t rows, float scale) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  for (int32_t turn = 0; turn < (((rows + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[384]))), (__gm__ uint8_t*)((&(B[((((int64_t)turn) * (int64_t)24576) + (((int64_t)((int32_t)block_idx)) * (int64_t)384))]))), 1, 1536, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 1536, 1536);
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[0]))), (__gm__ uint8_t*)((&(L[((((int64_t)turn) * (int64_t)24576) + (((int64_t)((int32_t)block_idx)) * (int64_t)384))]))), 1, 1536, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 1536, 1536);
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(128), buf_dyn_shmem);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(1));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(1));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(ids[((((int64_t)turn) * (int64_t)384) + (((int64_t)((int32_t)block_idx)) * (int64_t)6))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[1408]))), 1, 24, static_cast<asc_store_l2_cache_mode>(4), 24, 24);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_vf_call<main_kernel_simt_vf_1>(cce::dim3(32), buf_dyn_shmem, scale);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(weights[((((int64_t)turn) * (int64_t)384) + (((int64_t)((int32_t)block_idx)) * (int64_t)6))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[1416]))), 1, 24, static_cast<asc_store_l2_cache_mode>(4), 24, 24);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
}
