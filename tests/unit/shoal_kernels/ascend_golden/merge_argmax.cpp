// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(32) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem) {
  float largest = float(0x0p+0f/*0.000000e+00*/);
  int32_t winner = 0;
  largest = ((__ubuf__ float*)buf_dyn_shmem)[((int32_t)threadIdx.x)];
  winner = ((__ubuf__ int32_t*)buf_dyn_shmem)[(((int32_t)threadIdx.x) + 16160)];
  for (int32_t t = 0; t < 505; ++t) {
    int32_t condval;
    if ((largest < ((__ubuf__ float*)buf_dyn_shmem)[((t * 32) + ((int32_t)threadIdx.x))])) {
      condval = ((__ubuf__ int32_t*)buf_dyn_shmem)[(((t * 32) + ((int32_t)threadIdx.x)) + 16160)];
    } else {
      condval = winner;
    }
    winner = condval;
    largest = max(((__ubuf__ float*)buf_dyn_shmem)[((t * 32) + ((int32_t)threadIdx.x))], largest);
  }
  ((__ubuf__ int32_t*)buf_dyn_shmem)[(((int32_t)threadIdx.x) + 32320)] = winner;
}

extern "C" __global__ __vector__ void main_kernel(__gm__ float* best, __gm__ int32_t* ids, __gm__ int32_t* token, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  for (int32_t turn = 0; turn < (((((rows + 31) >> 5) + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[0]))), (__gm__ uint8_t*)((&(best[((((int64_t)turn) * (int64_t)2048) + (((int64_t)((int32_t)block_idx)) * (int64_t)32))]))), 505, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4), 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), (rows * 4), 128);
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[16160]))), (__gm__ uint8_t*)((&(token[((((int64_t)turn) * (int64_t)2048) + (((int64_t)((int32_t)block_idx)) * (int64_t)32))]))), 505, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4), 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), (rows * 4), 128);
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(32), buf_dyn_shmem);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(ids[((((int64_t)turn) * (int64_t)2048) + (((int64_t)((int32_t)block_idx)) * (int64_t)32))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[32320]))), 1, (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4), static_cast<asc_store_l2_cache_mode>(4), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4), (min(32, max(((rows - (((int32_t)block_idx) * 32)) - (turn * 2048)), 0)) * 4));
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
}
