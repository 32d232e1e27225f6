// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem) {
  if (((int32_t)threadIdx.x) < 32) {
    ((__ubuf__ float*)buf_dyn_shmem)[(((int32_t)threadIdx.x) + 4352)] = float(0x0p+0f/*0.000000e+00*/);
  }
}

__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_1(__ubuf__ uint8_t* buf_dyn_shmem) {
  float wide[32];
  float sums[8];
  #pragma unroll
  for (int32_t i = 0; i < 8; ++i) {
    bfloat16_t seen_local_cast[4];
    *(uint2*)(seen_local_cast + 0) = *(__ubuf__ uint2*)(((__ubuf__ bfloat16_t*)buf_dyn_shmem) + ((i * 1024) + (((int32_t)threadIdx.x) * 4)));
    for (int32_t vec = 0; vec < 2; ++vec) {
      float2 _;
        uint1 v_ = *(uint1*)(seen_local_cast + (vec * 2));
        ((float2*)(&_))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&v_))[0]);
      float2 __1;
        uint1 v__1 = *(uint1*)(seen_local_cast + (vec * 2));
        ((float2*)(&__1))[0] = __bfloat1622float2((reinterpret_cast<bfloat16x2_t*>(&v__1))[0]);
      *(float2*)(wide + ((i * 4) + (vec * 2))) = (_ * __1);
    }
  }
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 8; ++i_1) {
    sums[i_1] = float(0x0p+0f/*0.000000e+00*/);
    #pragma unroll
    for (int32_t rv = 0; rv < 4; ++rv) {
      sums[i_1] = (sums[i_1] + wide[((i_1 * 4) + rv)]);
    }
    asc_syncthreads();
    sums[i_1] = tl::AscendAllReduce<tl::SumOp, 64, 1, 0>::run(sums[i_1], (&(((__ubuf__ float*)buf_dyn_shmem)[4096])));
  }
  if ((((int32_t)threadIdx.x) % 64) == 0) {
    #pragma unroll
    for (int32_t i_2 = 0; i_2 < 8; ++i_2) {
      ((__ubuf__ float*)buf_dyn_shmem)[(((i_2 * 4) + (((int32_t)threadIdx.x) >> 6)) + 4352)] = (((__ubuf__ float*)buf_dyn_shmem)[(((i_2 * 4) + (((int32_t)threadIdx.x) >> 6)) + 4352)] + sums[i_2]);
    }
  }
}

extern "C" __global__ __mix__(1, 2) void main_kernel(__gm__ bfloat16_t* F, __gm__ float* P, __gm__ float* Q, __gm__ bfloat16_t* X, int32_t rows) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  __cc__ float *total = (__cc__ float *)0;
  if ASC_IS_AIC {
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    for (int32_t turn = 0; turn < ((((((rows + 63) >> 6) * 20) + 31) - ((int32_t)block_idx)) >> 5); ++turn) {
      for (int32_t step = 0; step < 4; ++step) {
        asc_fill_l1((__cbuf__ uint16_t*)((__cbuf__ uint8_t*)((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((step & 1) * 16384)) + (min(64, max((rows - ((((turn * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64)), 0)) * 32)), (uint32_t)((uint32_t)0), { .repeat = static_cast<uint64_t>(16), .blk_num = static_cast<uint64_t>(max(0, (64 - max((rows - ((((turn * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64)), 0)))), .dst_gap = static_cast<uint64_t>((64 - max(0, (64 - max((rows - ((((turn * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64)), 0)))))});
        asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
        asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((step & 1) * 16384)), (&(X[((((((((int64_t)turn) * (int64_t)8) + (((int64_t)((int32_t)block_idx)) >> (int64_t)2)) / (int64_t)5) * (int64_t)1310720) + ((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)20) * (int64_t)1024)) + (((int64_t)step) * (int64_t)256))])), 40960, static_cast<asc_load_l2_cache_mode>(0), min(64, max((rows - ((((turn * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64)), 0)), 256, 0, 0);
        asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
        asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
        asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768), (&(F[(((((turn * 32) + ((int32_t)block_idx)) % 20) * 1024) + (step * 256))])), 40960, static_cast<asc_load_l2_cache_mode>(0), 48, 256, 0, 0);
        asc_fill_l1((__cbuf__ uint16_t*)((__cbuf__ uint8_t*)((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768) + 1536), (uint32_t)((uint32_t)0), { .repeat = static_cast<uint64_t>(16), .blk_num = static_cast<uint64_t>(16), .dst_gap = static_cast<uint64_t>(48)});
        asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
        if (step == 0) {
          asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
        }
        asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
        ascend_gemm_l1<64, 256, 64, 256, true, bfloat16_t>(((__cc__ float*)total), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((step & 1) * 16384)), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768), (step == 0), 0, 0);
        asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
        if (step == 3) {
          asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
        }
      }
      asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
      asc_set_l0c_copy_nz_para(1, 0, 0);
      asc_copy_l0c2gm((&(P[(((((((int64_t)turn) * (int64_t)8) + (((int64_t)((int32_t)block_idx)) >> (int64_t)2)) / (int64_t)5) * (int64_t)4096) + (((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)20) * ((int64_t)rows)) * (int64_t)64))])), ((__cc__ float*)total), 64, min(64, max((rows - ((((turn * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64)), 0)), 64, 64, static_cast<asc_store_l2_cache_mode>(0), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
      asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    }
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
  }
  if ASC_IS_AIV {
    int32_t sid = asc_get_sub_block_id();
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    for (int32_t turn_1 = 0; turn_1 < ((((((rows + 63) >> 6) * 20) + 31) - ((int32_t)block_idx)) >> 5); ++turn_1) {
      asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
      asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem);
      for (int32_t step_1 = 0; step_1 < 4; ++step_1) {
        asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
        if (0 < ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))) {
          asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[0]))), (__gm__ uint8_t*)((&(X[(((((((((int64_t)turn_1) * (int64_t)8) + (((int64_t)((int32_t)block_idx)) >> (int64_t)2)) / (int64_t)5) * (int64_t)1310720) + (((int64_t)sid) * (int64_t)655360)) + ((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)20) * (int64_t)1024)) + (((int64_t)step_1) * (int64_t)256))]))), min(32, ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))), 512, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 40960, 512);
        }
        asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
        asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
        asc_vf_call<main_kernel_simt_vf_1>(cce::dim3(256), buf_dyn_shmem);
        asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
        if (step_1 == 3) {
          asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
        }
      }
      asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
      if (0 < ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))) {
        asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Q[((((((((int64_t)turn_1) * (int64_t)8) + (((int64_t)((int32_t)block_idx)) >> (int64_t)2)) / (int64_t)5) * (int64_t)64) + (((int64_t)sid) * (int64_t)32)) + ((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)20) * ((int64_t)rows)))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[4352]))), 1, (min(32, ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))) * 4), static_cast<asc_store_l2_cache_mode>(4), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))) * 4), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 5) * 64))) * 4));
      }
      asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    }
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
}
