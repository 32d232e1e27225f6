// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, int32_t turn) {
  float values[20];
  float largest[5];
  #pragma unroll
  for (int32_t i = 0; i < 5; ++i) {
    bfloat16_t x_local_cast[4];
    *(uint2*)(x_local_cast + 0) = *(__ubuf__ uint2*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + ((((turn & 1) * 5120) + (i * 1024)) + (((int32_t)threadIdx.x) * 4)));
    for (int32_t vec = 0; vec < 2; ++vec) {
      float2 _;
        uint1 v_ = *(uint1*)(x_local_cast + (vec * 2));
        ((float2*)(&_))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&v_))[0]);
      *(float2*)(values + ((i * 4) + (vec * 2))) = _;
    }
  }
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 5; ++i_1) {
    largest[i_1] = float(0x0p+0f/*0.000000e+00*/);
    #pragma unroll
    for (int32_t rv = 0; rv < 4; ++rv) {
      largest[i_1] = max(largest[i_1], max(values[((i_1 * 4) + rv)], (float(0x0p+0f/*0.000000e+00*/) - values[((i_1 * 4) + rv)])));
    }
    largest[i_1] = tl::AscendAllReduce<tl::MaxOp, 8, 1, 0>::run(largest[i_1]);
  }
  #pragma unroll
  for (int32_t i_2 = 0; i_2 < 5; ++i_2) {
    bfloat16_t y_local_cast_1[4];
    for (int32_t vec_1 = 0; vec_1 < 2; ++vec_1) {
      float broadcast_var = float(-0x1.cp+8f/*-4.480000e+02*/);
      float broadcast_var_1 = float(0x1.cp+8f/*4.480000e+02*/);
      uint1 __1;
        float2 __2;
          fp8_e4_2_t __3;
            float2 __4;
              float2 __5;
                    float v__1 = max(largest[i_2], float(0x1.a36e2eb1c432dp-14f/*1.000000e-04*/)) / float(0x1.cp+8f/*4.480000e+02*/);
                  int32_t v__2 = (254 - ((((*(int32_t *)(&(v__1))) + 8388607) >> 23) & 255)) << 23;
                float2 v__3 = *(float2*)(values + ((i_2 * 4) + (vec_1 * 2))) * make_float2((*(float *)(&(v__2))), (*(float *)(&(v__2))));
                float2 v__4 = make_float2(broadcast_var, broadcast_var);
                __5.x = max(v__3.x, v__4.x);
                __5.y = max(v__3.y, v__4.y);
              float2 v__5 = make_float2(broadcast_var_1, broadcast_var_1);
              __4.x = min(__5.x, v__5.x);
              __4.y = min(__5.y, v__5.y);
            (reinterpret_cast<uint16_t*>(&__3))[0] = __asc_cvt_float2_to_fp8x2(((float2*)(&__4))[0], __ASC_SATFINITE, __ASC_E4M3);
          ((float2*)(&__2))[0] = __e4m3x22float2((reinterpret_cast<float8_e4m3x2_t*>(&__3))[0]);
            float v__6 = max(largest[i_2], float(0x1.a36e2eb1c432dp-14f/*1.000000e-04*/)) / float(0x1.cp+8f/*4.480000e+02*/);
          int32_t condval;
          if ((((((*(int32_t *)(&(v__6))) + 8388607) >> 23) & 255) == 0)) {
            condval = 4194304;
          } else {
              float v__7 = max(largest[i_2], float(0x1.a36e2eb1c432dp-14f/*1.000000e-04*/)) / float(0x1.cp+8f/*4.480000e+02*/);
            condval = (((((*(int32_t *)(&(v__7))) + 8388607) >> 23) & 255) << 23);
          }
        float2 v__8 = __2 * make_float2((*(float *)(&(condval))), (*(float *)(&(condval))));
        (reinterpret_cast<bfloat16x2_t*>(&__1))[0] = __float22bfloat162_rn(((float2*)(&v__8))[0]);
      *(uint1*)(y_local_cast_1 + (vec_1 * 2)) = __1;
    }
    *(__ubuf__ uint2*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + (((((turn & 1) * 5120) + (i_2 * 1024)) + (((int32_t)threadIdx.x) * 4)) + 10240)) = *(uint2*)(y_local_cast_1 + 0);
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ bfloat16_t* X, __gm__ bfloat16_t* Y, __gm__ int32_t* row_of, int32_t pairs, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
  for (int32_t turn = 0; turn < (((pairs + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    int32_t row = row_of[((((int64_t)turn) * (int64_t)64) + ((int64_t)((int32_t)block_idx)))];
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    if (0 < (rows - row)) {
      asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((turn & 1) * 5120)]))), (__gm__ uint8_t*)((&(X[(((int64_t)row) * (int64_t)5120)]))), 1, 10240, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 10240, 10240);
    }
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem, turn);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[((((int64_t)turn) * (int64_t)327680) + (((int64_t)((int32_t)block_idx)) * (int64_t)5120))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((turn & 1) * 5120) + 10240)]))), 1, 10240, static_cast<asc_store_l2_cache_mode>(4), 10240, 10240);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
}
