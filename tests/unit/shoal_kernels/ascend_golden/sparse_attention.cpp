// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
#include <tl_templates/ascend/nd2nz_copy.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem) {
  if (((int32_t)threadIdx.x) < 32) {
    ((__ubuf__ float*)buf_dyn_shmem)[(((int32_t)threadIdx.x) + 49728)] = float(0x1p+0f/*1.000000e+00*/);
  }
  #pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    float broadcast_var = float(0x0p+0f/*0.000000e+00*/);
    *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2))) = make_float2(broadcast_var, broadcast_var);
  }
}

__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_1(__ubuf__ uint8_t* buf_dyn_shmem, int32_t sid, int32_t chunk, int32_t block_1) {
  #pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    float condval;
    if ((0 < (((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) & 128))) {
      float condval_1;
      if ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) >> 3) & 15) == 0)) {
        condval_1 = (((float)(((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) & 7)) * float(0x1p-9f/*1.953125e-03*/));
      } else {
          int32_t v_ = ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) >> 3) & 15) + 120) << 23) | ((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) & 7) << 20);
        condval_1 = (*(float *)(&(v_)));
      }
      condval = (condval_1 * float(-0x1p+0f/*-1.000000e+00*/));
    } else {
      float condval_2;
      if ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) >> 3) & 15) == 0)) {
        condval_2 = (((float)(((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) & 7)) * float(0x1p-9f/*1.953125e-03*/));
      } else {
          int32_t v__1 = ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) >> 3) & 15) + 120) << 23) | ((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 256)) + ((int32_t)threadIdx.x)) + 181248)]) & 7) << 20);
        condval_2 = (*(float *)(&(v__1)));
      }
      condval = condval_2;
    }
      int32_t condval_3;
      if ((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 8)) + (((int32_t)threadIdx.x) >> 5)) + 181760)]) == 0)) {
        condval_3 = 4194304;
      } else {
        condval_3 = (((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 8)) + (((int32_t)threadIdx.x) >> 5)) + 181760)]) << 23);
      }
    float eight = (condval * (*(float *)(&(condval_3))));
      int32_t condval_4;
      if (((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 128)) + (((int32_t)threadIdx.x) >> 1)) + 181248)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) == 0)) {
        condval_4 = 0;
      } else {
        int32_t condval_5;
        if (((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 128)) + (((int32_t)threadIdx.x) >> 1)) + 181248)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) == 1)) {
          condval_5 = 1056964608;
        } else {
          condval_5 = (((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 128)) + (((int32_t)threadIdx.x) >> 1)) + 181248)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) * 4194304) + 1056964608);
        }
        condval_4 = condval_5;
      }
      int32_t v__2 = condval_4 | ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 128)) + (((int32_t)threadIdx.x) >> 1)) + 181248)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 8) << 28);
    float condval_6;
    if ((0 < (((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) & 128))) {
      float condval_7;
      if ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) >> 3) & 15) == 0)) {
        condval_7 = (((float)(((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) & 7)) * float(0x1p-9f/*1.953125e-03*/));
      } else {
          int32_t v__3 = ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) >> 3) & 15) + 120) << 23) | ((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) & 7) << 20);
        condval_7 = (*(float *)(&(v__3)));
      }
      condval_6 = (condval_7 * float(-0x1p+0f/*-1.000000e+00*/));
    } else {
      float condval_8;
      if ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) >> 3) & 15) == 0)) {
        condval_8 = (((float)(((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) & 7)) * float(0x1p-9f/*1.953125e-03*/));
      } else {
          int32_t v__4 = ((((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) >> 3) & 15) + 120) << 23) | ((((int32_t)buf_dyn_shmem[(((((i >> 1) * 544) + ((i & 1) * 16)) + (((int32_t)threadIdx.x) >> 4)) + 181504)]) & 7) << 20);
        condval_8 = (*(float *)(&(v__4)));
      }
      condval_6 = condval_8;
    }
    float four = ((*(float *)(&(v__2))) * condval_6);
    asc_syncthreads();
    float condval_9;
    if ((0 <= ((__ubuf__ int32_t*)buf_dyn_shmem)[((((sid * 32) + (chunk * 16)) + (i >> 1)) + 49568)])) {
      float condval_10;
      if ((block_1 < 2)) {
        condval_10 = eight;
      } else {
        condval_10 = four;
      }
      condval_9 = condval_10;
    } else {
      condval_9 = float(0x0p+0f/*0.000000e+00*/);
    }
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i * 256) + ((int32_t)threadIdx.x)) + 74240)] = ((bfloat16_t)condval_9);
  }
  asc_syncthreads();
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 32; ++i_1) {
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i_1 * 256) + ((int32_t)threadIdx.x)) + 82432)] = ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((((((int32_t)threadIdx.x) & 15) * 512) + (i_1 * 16)) + (((int32_t)threadIdx.x) >> 4)) + 74240)];
  }
}

__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_2(__ubuf__ uint8_t* buf_dyn_shmem, float scale) {
  float s[8];
  float largest[2];
  float added[2];
  #pragma unroll
  for (int32_t i = 0; i < 8; ++i) {
    float condval;
    if ((0 <= ((__ubuf__ int32_t*)buf_dyn_shmem)[((((((int32_t)threadIdx.x) & 15) * 4) + (i & 3)) + 49568)])) {
      condval = (((__ubuf__ float*)buf_dyn_shmem)[(((((i >> 2) * 1024) + (((int32_t)threadIdx.x) * 4)) + (i & 3)) + 41216)] * scale);
    } else {
      condval = tl::limits::kFloatNInf;
    }
    s[i] = condval;
  }
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 2; ++i_1) {
    largest[i_1] = tl::limits::kFloatNInf;
    #pragma unroll
    for (int32_t rv = 0; rv < 4; ++rv) {
      largest[i_1] = max(largest[i_1], s[((i_1 * 4) + rv)]);
    }
    largest[i_1] = tl::AscendAllReduce<tl::MaxOp, 16, 1, 0>::run(largest[i_1]);
  }
  #pragma unroll
  for (int32_t i_2 = 0; i_2 < 2; ++i_2) {
    largest[i_2] = max(largest[i_2], ((__ubuf__ float*)buf_dyn_shmem)[(((i_2 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49696)]);
  }
  #pragma unroll
  for (int32_t i_3 = 0; i_3 < 4; ++i_3) {
    float2 _;
      float2 v_ = *(float2*)(s + (i_3 * 2)) - make_float2(largest[(i_3 >> 1)], largest[(i_3 >> 1)]);
      _.x = expf(v_.x);
      _.y = expf(v_.y);
    *(float2*)(s + (i_3 * 2)) = _;
  }
  #pragma unroll
  for (int32_t i_4 = 0; i_4 < 2; ++i_4) {
    added[i_4] = float(0x0p+0f/*0.000000e+00*/);
    #pragma unroll
    for (int32_t rv_1 = 0; rv_1 < 4; ++rv_1) {
      added[i_4] = (added[i_4] + s[((i_4 * 4) + rv_1)]);
    }
    added[i_4] = tl::AscendAllReduce<tl::SumOp, 16, 1, 0>::run(added[i_4]);
  }
  #pragma unroll
  for (int32_t i_5 = 0; i_5 < 2; ++i_5) {
    bfloat16_t share_local_cast[4];
    for (int32_t vec = 0; vec < 2; ++vec) {
      uint1 __1;
        float2 v__1 = *(float2*)(s + ((i_5 * 4) + (vec * 2)));
        (reinterpret_cast<bfloat16x2_t*>(&__1))[0] = __float22bfloat162_rn(((float2*)(&v__1))[0]);
      *(uint1*)(share_local_cast + (vec * 2)) = __1;
    }
    *(__ubuf__ uint2*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + (((i_5 * 1024) + (((int32_t)threadIdx.x) * 4)) + 97088)) = *(uint2*)(share_local_cast + 0);
  }
  if ((((int32_t)threadIdx.x) % 16) == 0) {
    #pragma unroll
    for (int32_t i_6 = 0; i_6 < 2; ++i_6) {
      ((__ubuf__ float*)buf_dyn_shmem)[(((i_6 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49760)] = expf((((__ubuf__ float*)buf_dyn_shmem)[(((i_6 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49696)] - largest[i_6]));
      ((__ubuf__ float*)buf_dyn_shmem)[(((i_6 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49728)] = ((((__ubuf__ float*)buf_dyn_shmem)[(((i_6 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49728)] * expf((((__ubuf__ float*)buf_dyn_shmem)[(((i_6 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49696)] - largest[i_6]))) + added[i_6]);
    }
  }
  asc_syncthreads();
  if ((((int32_t)threadIdx.x) % 16) == 0) {
    #pragma unroll
    for (int32_t i_7 = 0; i_7 < 2; ++i_7) {
      ((__ubuf__ float*)buf_dyn_shmem)[(((i_7 * 16) + (((int32_t)threadIdx.x) >> 4)) + 49696)] = largest[i_7];
    }
  }
}

__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_3(__ubuf__ uint8_t* buf_dyn_shmem) {
  #pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2))) = ((*(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2))) * make_float2(((__ubuf__ float*)buf_dyn_shmem)[(i + 49760)], ((__ubuf__ float*)buf_dyn_shmem)[(i + 49760)])) + *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + (((i * 512) + (((int32_t)threadIdx.x) * 2)) + 16384)));
  }
}

__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_4(__ubuf__ uint8_t* buf_dyn_shmem) {
  #pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    float total_local_cast_1[2];
    float weight_local_cast_2[2];
    *(float2*)(weight_local_cast_2 + 0) = make_float2(((__ubuf__ float*)buf_dyn_shmem)[(i + 49728)], ((__ubuf__ float*)buf_dyn_shmem)[(i + 49728)]);
    *(float2*)(total_local_cast_1 + 0) = *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2)));
    float2 _;
      uint1 __1;
        float2 __2;
          float2 v_ = *(float2*)(total_local_cast_1 + 0);
          float2 v__1 = *(float2*)(weight_local_cast_2 + 0);
          __2.x = (v_.x/v__1.x);
          __2.y = (v_.y/v__1.y);
        (reinterpret_cast<bfloat16x2_t*>(&__1))[0] = __float22bfloat162_rn(((float2*)(&__2))[0]);
      ((float2*)(&_))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&__1))[0]);
    *(float2*)(total_local_cast_1 + 0) = _;
    *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2))) = *(float2*)(total_local_cast_1 + 0);
  }
  asc_syncthreads();
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 28; ++i_1) {
    bfloat16_t out_local_cast_3[2];
    float total_local_cast_4[2];
    *(float2*)(total_local_cast_4 + 0) = *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + (((((i_1 * 8) + (((int32_t)threadIdx.x) >> 5)) / 7) * 512) + ((((i_1 * 256) + ((int32_t)threadIdx.x)) % 224) * 2)));
    uint1 __3;
      float2 v__2 = *(float2*)(total_local_cast_4 + 0);
      (reinterpret_cast<bfloat16x2_t*>(&__3))[0] = __float22bfloat162_rn(((float2*)(&v__2))[0]);
    *(uint1*)(out_local_cast_3 + 0) = __3;
    *(__ubuf__ uint1*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + ((((((i_1 * 8) + (((int32_t)threadIdx.x) >> 5)) / 7) * 512) + ((((i_1 * 256) + ((int32_t)threadIdx.x)) % 224) * 2)) + 32768)) = *(uint1*)(out_local_cast_3 + 0);
  }
  asc_syncthreads();
  #pragma unroll
  for (int32_t i_2 = 0; i_2 < 4; ++i_2) {
    float even = ((__ubuf__ float*)buf_dyn_shmem)[((((i_2 * 4096) + ((((int32_t)threadIdx.x) >> 5) * 512)) + ((((int32_t)threadIdx.x) & 31) * 2)) + 448)];
    float odd = ((__ubuf__ float*)buf_dyn_shmem)[((((i_2 * 4096) + ((((int32_t)threadIdx.x) >> 5) * 512)) + ((((int32_t)threadIdx.x) & 31) * 2)) + 449)];
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((((i_2 * 4096) + ((((int32_t)threadIdx.x) >> 5) * 512)) + ((((int32_t)threadIdx.x) & 31) * 2)) + 33216)] = ((bfloat16_t)((even * ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) & 31) + 49632)]) + (odd * ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) & 31) + 49664)])));
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((((i_2 * 4096) + ((((int32_t)threadIdx.x) >> 5) * 512)) + ((((int32_t)threadIdx.x) & 31) * 2)) + 33217)] = ((bfloat16_t)((odd * ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) & 31) + 49632)]) - (even * ((__ubuf__ float*)buf_dyn_shmem)[((((int32_t)threadIdx.x) & 31) + 49664)])));
  }
}

extern "C" __global__ __mix__(1, 2) void main_kernel(__gm__ float* CS, __gm__ bfloat16_t* Q, __gm__ bfloat16_t* Y, __gm__ int32_t* blocks, __gm__ uint8_t* entries, __gm__ int64_t* positions, __gm__ int32_t* row_seq, __gm__ float* sink, __gm__ int32_t* top, __gm__ int32_t* window_index, __gm__ uint8_t* window_rows, int32_t length, int32_t most, int32_t page_bytes, int32_t pages, int32_t places, int32_t rows, float scale, int32_t sequences) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __cc__ uint8_t *buf_dyn_l0c = (__cc__ uint8_t *)0;
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  if ASC_IS_AIC {
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    for (int32_t turn = 0; turn < (((rows + 31) - ((int32_t)block_idx)) >> 5); ++turn) {
      asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
      asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1), (&(Q[((((int64_t)turn) * (int64_t)1048576) + (((int64_t)((int32_t)block_idx)) * (int64_t)32768))])), 1024, static_cast<asc_load_l2_cache_mode>(0), 64, 512, 0, 0);
      asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
      for (int32_t block = 0; block < 10; ++block) {
        if (block == 0) {
          asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
        }
        asc_sync_intra_wait(PIPE_MTE1, 19);
        asc_sync_intra_wait(PIPE_MTE1, 3);
        ascend_gemm_l1<64, 512, 64, 256, true, bfloat16_t>(((__cc__ float*)buf_dyn_l0c), ((__cbuf__ bfloat16_t*)buf_dyn_l1), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768), (bool)1, 0, 0);
        asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(1));
        if (block == 9) {
          asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
        }
        asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(1));
        asc_set_l0c_copy_nz_para(1, 0, 0);
        asc_copy_l0c2ub((&(((__ubuf__ float*)buf_dyn_shmem)[41216])), ((__cc__ float*)buf_dyn_l0c), 64, 64, 64, 64, 0, static_cast<asc_dual_dst_mode>(1), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
        asc_sync_intra_arrive(PIPE_FIX, 2);
        asc_sync_intra_arrive(PIPE_FIX, 18);
        asc_sync_intra_wait(PIPE_MTE1, 17);
        asc_sync_intra_wait(PIPE_MTE1, 1);
        ascend_gemm_l1<64, 64, 512, 32, true, bfloat16_t>(((__cc__ float*)buf_dyn_l0c), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 98304), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 65536), (bool)1, 0, 0);
        asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
        asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
        asc_set_l0c_copy_nz_para(1, 0, 0);
        asc_copy_l0c2ub((&(((__ubuf__ float*)buf_dyn_shmem)[16384])), ((__cc__ float*)buf_dyn_l0c), 512, 64, 512, 64, 0, static_cast<asc_dual_dst_mode>(1), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
        asc_sync_intra_arrive(PIPE_FIX, 0);
        asc_sync_intra_arrive(PIPE_FIX, 16);
      }
    }
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
  }
  if ASC_IS_AIV {
    int32_t sid = asc_get_sub_block_id();
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
    asc_sync_notify(PIPE_S, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(2));
    for (int32_t turn_1 = 0; turn_1 < (((rows + 31) - ((int32_t)block_idx)) >> 5); ++turn_1) {
      int64_t position = positions[((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx)))];
      asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(2));
      if ((int64_t)0 < (((int64_t)length) - position)) {
        asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[49632]))), (__gm__ uint8_t*)((&(CS[(position * (int64_t)64)]))), 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
      }
      asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem);
      asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[49696]))), (__gm__ uint8_t*)((&(sink[(sid * 32)]))), 1, 128, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 128, 128);
      int32_t sequence = row_seq[((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx)))];
      for (int32_t block_1 = 0; block_1 < 10; ++block_1) {
        asc_sync_wait(PIPE_S, PIPE_MTE2, static_cast<event_t>(0));
        asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
        if (2 <= block_1) {
          asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[49568]))), (__gm__ uint8_t*)((&(top[((((((int64_t)turn_1) * (int64_t)16384) + (((int64_t)((int32_t)block_idx)) * (int64_t)512)) + (((int64_t)block_1) * (int64_t)64)) - (int64_t)128)]))), 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
        }
        if (block_1 < 2) {
          asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[49568]))), (__gm__ uint8_t*)((&(window_index[(((((int64_t)turn_1) * (int64_t)4096) + (((int64_t)((int32_t)block_idx)) * (int64_t)128)) + (((int64_t)block_1) * (int64_t)64))]))), 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
        }
        asc_sync_notify(PIPE_MTE2, PIPE_S, static_cast<event_t>(0));
        for (int32_t chunk = 0; chunk < 2; ++chunk) {
          for (int32_t i = 0; i < 16; ++i) {
            if ((chunk == 0) && (i == 0)) {
              asc_sync_wait(PIPE_MTE2, PIPE_S, static_cast<event_t>(0));
            }
            int32_t key = ((__ubuf__ int32_t*)buf_dyn_shmem)[((((sid * 32) + (chunk * 16)) + i) + 49568)];
            if ((chunk == 1) && (i == 15)) {
              asc_sync_notify(PIPE_S, PIPE_MTE2, static_cast<event_t>(0));
            }
            int8_t __cond_1 = ((int8_t)(bool)0);
            if (0 <= key) {
              __cond_1 = ((int8_t)(block_1 < 2));
            }
            int32_t at = 0;
            if (0 <= key) {
              if (!((bool)__cond_1)) {
                int32_t condval;
                if (((((key >> 6) < most) && (0 <= sequence)) && (sequence < sequences))) {
                  condval = blocks[((((int64_t)key) >> (int64_t)6) + (((int64_t)sequence) * ((int64_t)most)))];
                } else {
                  condval = 0;
                }
                at = condval;
              }
            }
            if (i == 0) {
              asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
            }
            if (0 <= key) {
              if (!((bool)__cond_1)) {
                if (0 < (pages - at)) {
                  asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(buf_dyn_shmem[((i * 544) + 181248)]))), (__gm__ uint8_t*)((&(entries[(((((int64_t)key) & (int64_t)63) * (int64_t)288) + (((int64_t)at) * ((int64_t)page_bytes)))]))), 1, 288, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 288, 288);
                }
              }
              if ((bool)__cond_1) {
                if (0 < (places - key)) {
                  asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(buf_dyn_shmem[((i * 544) + 181248)]))), (__gm__ uint8_t*)((&(window_rows[(((int64_t)key) * (int64_t)528)]))), 1, 528, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 528, 528);
                }
              }
            }
            if (i == 15) {
              asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
            }
          }
          asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
          asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
          asc_vf_call<main_kernel_simt_vf_1>(cce::dim3(256), buf_dyn_shmem, sid, chunk, block_1);
          asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(1));
          asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
          asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
          ascend_nd2nz_scatter<16, 512, bfloat16_t, bfloat16_t>((__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[74240]))), (__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[65536]))));
          asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
          asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(1));
          asc_copy_ub2l1((__cbuf__ void*)(((__cbuf__ bfloat16_t*)buf_dyn_l1 + (((sid * 16384) + (chunk * 8192)) + 65536))), (__ubuf__ void*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[82432]))), 1, 512, 1, 0);
          asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
          asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
          asc_copy_ub2l1((__cbuf__ void*)(((__cbuf__ bfloat16_t*)buf_dyn_l1 + (((sid * 512) + (chunk * 256)) + 32768))), (__ubuf__ void*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[65536]))), 32, 16, 1, 48);
          asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
          if (chunk == 1) {
            asc_sync_intra_arrive(PIPE_MTE3, 3);
          }
        }
        asc_sync_intra_wait(PIPE_V, 2);
        asc_vf_call<main_kernel_simt_vf_2>(cce::dim3(256), buf_dyn_shmem, scale);
        asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
        ascend_nd2nz_scatter<32, 64, bfloat16_t, bfloat16_t>((__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[97088]))), (__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[94976]))));
        asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(2));
        asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(2));
        asc_copy_ub2l1((__cbuf__ void*)(((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((sid * 512) + 98304))), (__ubuf__ void*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[94976]))), 4, 32, 1, 32);
        asc_sync_intra_arrive(PIPE_MTE3, 1);
        asc_sync_intra_wait(PIPE_V, 0);
        asc_vf_call<main_kernel_simt_vf_3>(cce::dim3(256), buf_dyn_shmem);
      }
      asc_vf_call<main_kernel_simt_vf_4>(cce::dim3(256), buf_dyn_shmem);
      asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(3));
      asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(2));
      asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(3));
      asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[(((((int64_t)turn_1) * (int64_t)1048576) + (((int64_t)((int32_t)block_idx)) * (int64_t)32768)) + (((int64_t)sid) * (int64_t)16384))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[32768]))), 1, 32768, static_cast<asc_store_l2_cache_mode>(0), 32768, 32768);
    }
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(1));
    asc_sync_wait(PIPE_S, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(2));
  }
}
