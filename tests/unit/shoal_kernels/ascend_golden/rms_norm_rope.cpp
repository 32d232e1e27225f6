// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(128) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, int32_t turn, float eps) {
  float values[4];
  float squares[4];
  float total[1];
  #pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float2 _;
      uint1 v_ = *(__ubuf__ uint1*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + (((((turn & 1) * 512) + (i * 256)) + (((int32_t)threadIdx.x) * 2)) + 1024));
      ((float2*)(&_))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&v_))[0]);
    *(float2*)(values + (i * 2)) = _;
    *(float2*)(squares + (i * 2)) = (*(float2*)(values + (i * 2)) * *(float2*)(values + (i * 2)));
  }
  total[0] = float(0x0p+0f/*0.000000e+00*/);
  #pragma unroll
  for (int32_t rv = 0; rv < 4; ++rv) {
    total[0] = (total[0] + squares[(((rv & 1) * 2) + (rv >> 1))]);
  }
  total[0] = tl::AscendAllReduce<tl::SumOp, 128, 1, 0>::run(total[0], (&(((__ubuf__ float*)buf_dyn_shmem)[2176])));
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 2; ++i_1) {
    float z_local_cast[2];
    float w_local_cast_1[2];
    *(float2*)(w_local_cast_1 + 0) = *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i_1 * 256) + (((int32_t)threadIdx.x) * 2)));
    float2 __1;
      uint1 __2;
        float2 v__1 = (*(float2*)(values + (i_1 * 2)) * make_float2((float(0x1p+0f/*1.000000e+00*/) / sqrtf(((total[0] / float(0x1p+9f/*5.120000e+02*/)) + eps))), (float(0x1p+0f/*1.000000e+00*/) / sqrtf(((total[0] / float(0x1p+9f/*5.120000e+02*/)) + eps))))) * *(float2*)(w_local_cast_1 + 0);
        (reinterpret_cast<bfloat16x2_t*>(&__2))[0] = __float22bfloat162_rn(((float2*)(&v__1))[0]);
      ((float2*)(&__1))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&__2))[0]);
    *(float2*)(z_local_cast + 0) = __1;
    *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + (((i_1 * 256) + (((int32_t)threadIdx.x) * 2)) + 1024)) = *(float2*)(z_local_cast + 0);
  }
}

__simt_vf__ __launch_bounds__(128) inline void main_kernel_simt_vf_1(__ubuf__ uint8_t* buf_dyn_shmem, int32_t turn) {
  #pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    bfloat16_t y_local_cast_2[2];
    float z_local_cast_3[2];
    if (((i * 4) + (((int32_t)threadIdx.x) >> 5)) < 7) {
      *(float2*)(z_local_cast_3 + 0) = *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + (((i * 256) + (((int32_t)threadIdx.x) * 2)) + 1024));
      uint1 _;
        float2 v_ = *(float2*)(z_local_cast_3 + 0);
        (reinterpret_cast<bfloat16x2_t*>(&_))[0] = __float22bfloat162_rn(((float2*)(&v_))[0]);
      *(uint1*)(y_local_cast_2 + 0) = _;
      *(__ubuf__ uint1*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + (((((turn & 1) * 512) + (i * 256)) + (((int32_t)threadIdx.x) * 2)) + 3072)) = *(uint1*)(y_local_cast_2 + 0);
    }
  }
  if (((int32_t)threadIdx.x) < 32) {
    float even = ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) * 2) + 1472)];
    float odd = ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) * 2) + 1473)];
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((((turn & 1) * 512) + (((int32_t)threadIdx.x) * 2)) + 3520)] = ((bfloat16_t)((even * ((__ubuf__ float*)buf_dyn_shmem)[((((turn & 1) * 64) + ((int32_t)threadIdx.x)) + 2048)]) - (odd * ((__ubuf__ float*)buf_dyn_shmem)[((((turn & 1) * 64) + ((int32_t)threadIdx.x)) + 2080)])));
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((((turn & 1) * 512) + (((int32_t)threadIdx.x) * 2)) + 3521)] = ((bfloat16_t)((even * ((__ubuf__ float*)buf_dyn_shmem)[((((turn & 1) * 64) + ((int32_t)threadIdx.x)) + 2080)]) + (odd * ((__ubuf__ float*)buf_dyn_shmem)[((((turn & 1) * 64) + ((int32_t)threadIdx.x)) + 2048)])));
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ float* CS, __gm__ int64_t* P, __gm__ float* W, __gm__ bfloat16_t* X, __gm__ bfloat16_t* Y, float eps, int32_t length, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
  asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[0]))), (__gm__ uint8_t*)((&(W[0]))), 1, 2048, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 2048, 2048);
  asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(2));
  asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(2));
  for (int32_t turn = 0; turn < (((rows + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    int64_t position = P[((((int64_t)turn) * (int64_t)64) + ((int64_t)((int32_t)block_idx)))];
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    if ((int64_t)0 < (((int64_t)length) - position)) {
      asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[(((turn & 1) * 64) + 2048)]))), (__gm__ uint8_t*)((&(CS[(position * (int64_t)64)]))), 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
    }
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((turn & 1) * 512) + 1024)]))), (__gm__ uint8_t*)((&(X[((((int64_t)turn) * (int64_t)32768) + (((int64_t)((int32_t)block_idx)) * (int64_t)512))]))), 1, 1024, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 1024, 1024);
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(128), buf_dyn_shmem, turn, eps);
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_vf_call<main_kernel_simt_vf_1>(cce::dim3(128), buf_dyn_shmem, turn);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[((((int64_t)turn) * (int64_t)32768) + (((int64_t)((int32_t)block_idx)) * (int64_t)512))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((turn & 1) * 512) + 3072)]))), 1, 1024, static_cast<asc_store_l2_cache_mode>(4), 1024, 1024);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
}
