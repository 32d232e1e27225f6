// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, int32_t turn_1) {
  float z[32];
  int32_t tied[32];
  float largest[16];
  int32_t first[16];
  #pragma unroll
  for (int32_t i = 0; i < 16; ++i) {
    *(float2*)(z + (i * 2)) = *(__ubuf__ float2*)(((__ubuf__ float*)buf_dyn_shmem) + ((i * 512) + (((int32_t)threadIdx.x) * 2)));
  }
  #pragma unroll
  for (int32_t i_1 = 0; i_1 < 16; ++i_1) {
    largest[i_1] = tl::limits::kFloatNInf;
    #pragma unroll
    for (int32_t rv = 0; rv < 2; ++rv) {
      largest[i_1] = max(largest[i_1], z[((i_1 * 2) + rv)]);
    }
    asc_syncthreads();
    largest[i_1] = tl::AscendAllReduce<tl::MaxOp, 128, 1, 0>::run(largest[i_1], (&(((__ubuf__ float*)buf_dyn_shmem)[8192])));
  }
  #pragma unroll
  for (int32_t i_2 = 0; i_2 < 32; ++i_2) {
    int32_t condval;
    if ((z[i_2] == largest[(i_2 >> 1)])) {
      condval = (((((int32_t)threadIdx.x) & 127) * 2) + (i_2 & 1));
    } else {
      condval = 256;
    }
    tied[i_2] = condval;
  }
  #pragma unroll
  for (int32_t i_3 = 0; i_3 < 16; ++i_3) {
    first[i_3] = 2147483647;
    #pragma unroll
    for (int32_t rv_1 = 0; rv_1 < 2; ++rv_1) {
      first[i_3] = min(first[i_3], tied[((i_3 * 2) + rv_1)]);
    }
    asc_syncthreads();
    first[i_3] = tl::AscendAllReduce<tl::MinOp, 128, 1, 0>::run(first[i_3], (&(((__ubuf__ int32_t*)buf_dyn_shmem)[8448])));
  }
  if ((((int32_t)threadIdx.x) % 128) == 0) {
    #pragma unroll
    for (int32_t i_4 = 0; i_4 < 16; ++i_4) {
      ((__ubuf__ float*)buf_dyn_shmem)[(((i_4 * 2) + (((int32_t)threadIdx.x) >> 7)) + 8704)] = largest[i_4];
      ((__ubuf__ int32_t*)buf_dyn_shmem)[(((i_4 * 2) + (((int32_t)threadIdx.x) >> 7)) + 8736)] = (((((turn_1 * 32) + ((int32_t)block_idx)) % 505) * 256) + first[i_4]);
    }
  }
}

extern "C" __global__ __mix__(1, 2) void main_kernel(__gm__ bfloat16_t* W, __gm__ bfloat16_t* X, __gm__ float* best, __gm__ int32_t* token, int32_t rows) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  __cc__ float *total = (__cc__ float *)0;
  if ASC_IS_AIC {
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    for (int32_t turn = 0; turn < ((((((rows + 63) >> 6) * 505) + 31) - ((int32_t)block_idx)) >> 5); ++turn) {
      for (int32_t step = 0; step < 20; ++step) {
        asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(256), 0);
        asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((step & 1) * 65536)), (&(W[(((((turn * 32) + ((int32_t)block_idx)) % 505) * 1310720) + (step * 256))])), 10240, static_cast<asc_load_l2_cache_mode>(0), 256, 256, 0, 0);
        asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
        asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
        asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1 + 131072), (&(X[(((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)505) * (int64_t)327680) + (((int64_t)step) * (int64_t)256))])), 10240, static_cast<asc_load_l2_cache_mode>(0), min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 505) * 64)), 0)), 256, 0, 0);
        asc_fill_l1((__cbuf__ uint16_t*)((__cbuf__ uint8_t*)((__cbuf__ bfloat16_t*)buf_dyn_l1 + 131072) + (min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 505) * 64)), 0)) * 32)), (uint32_t)((uint32_t)0), { .repeat = static_cast<uint64_t>(16), .blk_num = static_cast<uint64_t>(max(0, (64 - max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 505) * 64)), 0)))), .dst_gap = static_cast<uint64_t>((64 - max(0, (64 - max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 505) * 64)), 0)))))});
        asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
        if (step == 0) {
          asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
        }
        asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
        ascend_gemm_l1<64, 256, 256, 64, true, bfloat16_t>(((__cc__ float*)total), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 131072), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + ((step & 1) * 65536)), (step == 0), 0, 0);
        asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
        if (step == 19) {
          asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
        }
      }
      asc_sync_intra_wait(PIPE_FIX, 16);
      asc_sync_intra_wait(PIPE_FIX, 0);
      asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
      asc_set_l0c_copy_nz_para(1, 0, 0);
      asc_copy_l0c2ub((&(((__ubuf__ float*)buf_dyn_shmem)[0])), ((__cc__ float*)total), 256, 64, 256, 64, 0, static_cast<asc_dual_dst_mode>(1), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
      asc_sync_intra_arrive(PIPE_FIX, 1);
      asc_sync_intra_arrive(PIPE_FIX, 17);
      asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    }
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_intra_wait(PIPE_FIX, 0);
    asc_sync_intra_wait(PIPE_FIX, 16);
    asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
  }
  if ASC_IS_AIV {
    int32_t sid = asc_get_sub_block_id();
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_intra_arrive(PIPE_V, 0);
    for (int32_t turn_1 = 0; turn_1 < ((((((rows + 63) >> 6) * 505) + 31) - ((int32_t)block_idx)) >> 5); ++turn_1) {
      asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
      asc_sync_intra_wait(PIPE_V, 1);
      asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem, turn_1);
      asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
      asc_sync_intra_arrive(PIPE_V, 0);
      asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
      if (0 < ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) {
        asc_copy_ub2gm_align((__gm__ uint8_t*)((&(token[((((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)505) * (int64_t)64) + (((int64_t)sid) * (int64_t)32)) + ((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)505) * ((int64_t)rows)))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ int32_t*)buf_dyn_shmem)[8736]))), 1, (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4), static_cast<asc_store_l2_cache_mode>(0), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4));
        asc_copy_ub2gm_align((__gm__ uint8_t*)((&(best[((((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)505) * (int64_t)64) + (((int64_t)sid) * (int64_t)32)) + ((((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)505) * ((int64_t)rows)))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[8704]))), 1, (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4), static_cast<asc_store_l2_cache_mode>(0), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4), (min(32, ((rows - (sid * 32)) - ((((turn_1 * 32) + ((int32_t)block_idx)) / 505) * 64))) * 4));
      }
      asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    }
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
}
