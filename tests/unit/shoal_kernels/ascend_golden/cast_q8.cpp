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
  if ((((int32_t)threadIdx.x) % 8) == 0) {
    #pragma unroll
    for (int32_t i_2 = 0; i_2 < 5; ++i_2) {
        float v__1 = max(largest[i_2], float(0x1.a36e2eb1c432dp-14f/*1.000000e-04*/)) / float(0x1.cp+8f/*4.480000e+02*/);
      buf_dyn_shmem[(((((turn & 1) * 160) + (i_2 * 32)) + (((int32_t)threadIdx.x) >> 3)) + 30720)] = ((uint8_t)((((*(int32_t *)(&(v__1))) + 8388607) >> 23) & 255));
    }
  }
  #pragma unroll
  for (int32_t i_3 = 0; i_3 < 5; ++i_3) {
    tl::float_e4m3_t y_local_cast_1[4];
    for (int32_t vec_1 = 0; vec_1 < 2; ++vec_1) {
      float broadcast_var = float(-0x1.cp+8f/*-4.480000e+02*/);
      float broadcast_var_1 = float(0x1.cp+8f/*4.480000e+02*/);
      fp8_e4_2_t __1;
        float2 __2;
          float2 __3;
                float v__2 = max(largest[i_3], float(0x1.a36e2eb1c432dp-14f/*1.000000e-04*/)) / float(0x1.cp+8f/*4.480000e+02*/);
              int32_t v__3 = (254 - ((((*(int32_t *)(&(v__2))) + 8388607) >> 23) & 255)) << 23;
            float2 v__4 = *(float2*)(values + ((i_3 * 4) + (vec_1 * 2))) * make_float2((*(float *)(&(v__3))), (*(float *)(&(v__3))));
            float2 v__5 = make_float2(broadcast_var, broadcast_var);
            __3.x = max(v__4.x, v__5.x);
            __3.y = max(v__4.y, v__5.y);
          float2 v__6 = make_float2(broadcast_var_1, broadcast_var_1);
          __2.x = min(__3.x, v__6.x);
          __2.y = min(__3.y, v__6.y);
        (reinterpret_cast<uint16_t*>(&__1))[0] = __asc_cvt_float2_to_fp8x2(((float2*)(&__2))[0], __ASC_SATFINITE, __ASC_E4M3);
      *(fp8_e4_2_t*)(y_local_cast_1 + (vec_1 * 2)) = __1;
    }
    *(__ubuf__ fp8_e4_4_t*)(((__ubuf__ tl::float_e4m3_t*)buf_dyn_shmem) + (((((turn & 1) * 5120) + (i_3 * 1024)) + (((int32_t)threadIdx.x) * 4)) + 20480)) = *(fp8_e4_4_t*)(y_local_cast_1 + 0);
  }
}

extern "C" __global__ __vector__ void main_kernel(__gm__ uint8_t* S, __gm__ bfloat16_t* X, __gm__ fp8_e4_t* Y, int32_t rows) {
  asc_init();
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
  for (int32_t turn = 0; turn < (((rows + 63) - ((int32_t)block_idx)) >> 6); ++turn) {
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((turn & 1) * 5120)]))), (__gm__ uint8_t*)((&(X[((((int64_t)turn) * (int64_t)327680) + (((int64_t)((int32_t)block_idx)) * (int64_t)5120))]))), 1, 10240, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 10240, 10240);
    asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>((turn & 1)));
    asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem, turn);
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>((turn & 1)));
    asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>((turn & 1)));
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[((((int64_t)turn) * (int64_t)327680) + (((int64_t)((int32_t)block_idx)) * (int64_t)5120))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ fp8_e4_t*)buf_dyn_shmem)[(((turn & 1) * 5120) + 20480)]))), 1, 5120, static_cast<asc_store_l2_cache_mode>(4), 5120, 5120);
    asc_copy_ub2gm_align((__gm__ uint8_t*)((&(S[((((int64_t)turn) * (int64_t)10240) + (((int64_t)((int32_t)block_idx)) * (int64_t)160))]))), (__ubuf__ uint8_t*)((&(buf_dyn_shmem[(((turn & 1) * 160) + 30720)]))), 1, 160, static_cast<asc_store_l2_cache_mode>(4), 160, 160);
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>((turn & 1)));
  }
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
}
