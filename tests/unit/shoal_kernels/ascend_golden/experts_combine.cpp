// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem) {
  float total = float(0x0p+0f/*0.000000e+00*/);
  #pragma unroll
  for (int32_t i = 0; i < 20; ++i) {
    total = float(0x0p+0f/*0.000000e+00*/);
    for (int32_t i_1 = 0; i_1 < 6; ++i_1) {
      total = (total + ((float)((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i_1 * 5120) + (i * 256)) + ((int32_t)threadIdx.x))]));
    }
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i * 256) + ((int32_t)threadIdx.x)) + 35840)] = ((bfloat16_t)(total + ((float)((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i * 256) + ((int32_t)threadIdx.x)) + 30720)])));
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ bfloat16_t* X, __gm__ bfloat16_t* Y, __gm__ bfloat16_t* Z, __gm__ int32_t* pair_of, int32_t pairs, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  for (int32_t turn = 0; turn < (((rows + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[30720]))), (__gm__ uint8_t*)((&(Z[((((int64_t)turn) * (int64_t)327680) + (((int64_t)((int32_t)block_idx)) * (int64_t)5120))]))), 1, 10240, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 10240, 10240);
    for (int32_t i = 0; i < 6; ++i) {
      int32_t pair = pair_of[(((((int64_t)turn) * (int64_t)384) + (((int64_t)((int32_t)block_idx)) * (int64_t)6)) + ((int64_t)i))];
      if (0 < (pairs - pair)) {
        asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(i * 5120)]))), (__gm__ uint8_t*)((&(X[(((int64_t)pair) * (int64_t)5120)]))), 1, 10240, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 10240, 10240);
      }
      if (i == 5) {
        asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
      }
    }
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[((((int64_t)turn) * (int64_t)327680) + (((int64_t)((int32_t)block_idx)) * (int64_t)5120))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[35840]))), 1, 10240, static_cast<asc_store_l2_cache_mode>(4), 10240, 10240);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
}
