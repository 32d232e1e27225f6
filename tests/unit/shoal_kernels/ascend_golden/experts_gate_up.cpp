// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
#include <tl_templates/ascend/nd2nz_copy.h>
__simt_vf__ __launch_bounds__(256) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, int32_t scales_version_counter_1, int32_t step_1) {
  #pragma unroll
  for (int32_t i = 0; i < 64; ++i) {
      int32_t condval;
      if ((((int32_t)buf_dyn_shmem[(((((((scales_version_counter_1 & 1) * 2048) + (i * 32)) + (step_1 * 8)) + (((int32_t)threadIdx.x) >> 5)) + 74240) - ((step_1 >> 2) * 32))]) == 0)) {
        condval = 4194304;
      } else {
        condval = (((int32_t)buf_dyn_shmem[(((((((scales_version_counter_1 & 1) * 2048) + (i * 32)) + (step_1 * 8)) + (((int32_t)threadIdx.x) >> 5)) + 74240) - ((step_1 >> 2) * 32))]) << 23);
      }
    float scale = (*(float *)(&(condval)));
      int32_t condval_1;
      if (((((((int32_t)buf_dyn_shmem[(((i * 128) + (((int32_t)threadIdx.x) >> 1)) + 66048)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) == 0)) {
        condval_1 = 0;
      } else {
        int32_t condval_2;
        if (((((((int32_t)buf_dyn_shmem[(((i * 128) + (((int32_t)threadIdx.x) >> 1)) + 66048)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) == 1)) {
          condval_2 = 1056964608;
        } else {
          condval_2 = (((((((int32_t)buf_dyn_shmem[(((i * 128) + (((int32_t)threadIdx.x) >> 1)) + 66048)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 7) * 4194304) + 1056964608);
        }
        condval_1 = condval_2;
      }
      int32_t v_ = condval_1 | ((((((int32_t)buf_dyn_shmem[(((i * 128) + (((int32_t)threadIdx.x) >> 1)) + 66048)]) >> ((((int32_t)threadIdx.x) & 1) * 4)) & 15) & 8) << 28);
    ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((i * 256) + ((int32_t)threadIdx.x)) + 16640)] = ((bfloat16_t)((*(float *)(&(v_))) * scale));
  }
}

extern "C" __global__ __mix__(1, 2) void main_kernel(__gm__ uint8_t* W, __gm__ uint8_t* WS, __gm__ bfloat16_t* X, __gm__ bfloat16_t* Y, __gm__ int32_t* first, int32_t pairs) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  __cc__ float *total = (__cc__ float *)0;
  int32_t scales_version_counter_1 = 0;
  if ASC_IS_AIC {
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_intra_arrive(PIPE_MTE1, 0);
    asc_sync_intra_arrive(PIPE_MTE1, 16);
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    scales_version_counter_1 = 0;
    for (int32_t turn = 0; turn < 432; ++turn) {
      int32_t begin = first[(((turn * 8) + (((int32_t)block_idx) >> 2)) / 9)];
      int32_t end = first[((((turn * 8) + (((int32_t)block_idx) >> 2)) / 9) + 1)];
      for (int32_t block = 0; block < (((end + 63) - begin) >> 6); ++block) {
        for (int32_t step = 0; step < 20; ++step) {
          asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
          asc_fill_l1((__cbuf__ uint16_t*)((__cbuf__ uint8_t*)((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768) + (min(64, max(((pairs - begin) - (block * 64)), 0)) * 32)), (uint32_t)((uint32_t)0), { .repeat = static_cast<uint64_t>(16), .blk_num = static_cast<uint64_t>(max(0, (64 - max(((pairs - begin) - (block * 64)), 0)))), .dst_gap = static_cast<uint64_t>((64 - max(0, (64 - max(((pairs - begin) - (block * 64)), 0)))))});
          if (0 < ((pairs - begin) - (block * 64))) {
            asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
            asc_copy_gm2l1_nd2nz(((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768), (&(X[(((((int64_t)block) * (int64_t)327680) + (((int64_t)begin) * (int64_t)5120)) + (((int64_t)step) * (int64_t)256))])), 10240, static_cast<asc_load_l2_cache_mode>(0), min(64, ((pairs - begin) - (block * 64))), 256, 0, 0);
          }
          asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
          if (step == 0) {
            asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
          }
          asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
          asc_sync_intra_wait(PIPE_MTE1, 17);
          asc_sync_intra_wait(PIPE_MTE1, 1);
          ascend_gemm_l1<64, 256, 128, 128, true, bfloat16_t>(((__cc__ float*)total), ((__cbuf__ bfloat16_t*)buf_dyn_l1 + 32768), ((__cbuf__ bfloat16_t*)buf_dyn_l1), (step == 0), 0, 0);
          asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
          asc_sync_intra_arrive(PIPE_MTE1, 0);
          asc_sync_intra_arrive(PIPE_MTE1, 16);
          if (step == 19) {
            asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
          }
          scales_version_counter_1 = (scales_version_counter_1 + 1);
        }
        asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
        if ((0 < ((end - begin) - (block * 64))) && (0 < ((pairs - begin) - (block * 64)))) {
          asc_set_l0c_copy_nz_para(1, 0, 0);
          asc_copy_l0c2gm((&(Y[(((((int64_t)block) * (int64_t)294912) + (((int64_t)begin) * (int64_t)4608)) + ((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)36) * (int64_t)128))])), ((__cc__ float*)total), 128, min(((min(end, pairs) - begin) - (block * 64)), 64), 4608, ((((min(((end - begin) - (block * 64)), 64) - 1) >> 4) * 16) + 16), static_cast<asc_store_l2_cache_mode>(0), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(16), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
        }
        asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
      }
    }
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
  }
  if ASC_IS_AIV {
    int32_t sid = asc_get_sub_block_id();
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    scales_version_counter_1 = 0;
    for (int32_t turn_1 = 0; turn_1 < 432; ++turn_1) {
      int32_t begin_1 = first[(((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 9)];
      int32_t end_1 = first[((((turn_1 * 8) + (((int32_t)block_idx) >> 2)) / 9) + 1)];
      for (int32_t block_1 = 0; block_1 < (((end_1 + 63) - begin_1) >> 6); ++block_1) {
        for (int32_t step_1 = 0; step_1 < 20; ++step_1) {
          asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(buf_dyn_shmem[(((scales_version_counter_1 & 1) * 2048) + 74240)]))), (__gm__ uint8_t*)((&(WS[((((turn_1 * 655360) + (((int32_t)block_idx) * 20480)) + (sid * 10240)) + ((step_1 >> 2) * 32))]))), 64, 32, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 160, 32);
          asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
          asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(buf_dyn_shmem[66048]))), (__gm__ uint8_t*)((&(W[((((((int64_t)turn_1) * (int64_t)10485760) + (((int64_t)((int32_t)block_idx)) * (int64_t)327680)) + (((int64_t)sid) * (int64_t)163840)) + (((int64_t)step_1) * (int64_t)128))]))), 64, 128, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 2560, 128);
          asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
          asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
          asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(256), buf_dyn_shmem, scales_version_counter_1, step_1);
          asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
          asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
          ascend_nd2nz_scatter<64, 256, bfloat16_t, bfloat16_t>((__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[16640]))), (__ubuf__ bfloat16_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[0]))));
          asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
          asc_sync_intra_wait(PIPE_MTE3, 0);
          asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
          asc_copy_ub2l1((__cbuf__ void*)(((__cbuf__ bfloat16_t*)buf_dyn_l1 + (sid * 1024))), (__ubuf__ void*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[0]))), 16, 64, 1, 64);
          asc_sync_intra_arrive(PIPE_MTE3, 1);
          asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
          scales_version_counter_1 = (scales_version_counter_1 + 1);
        }
      }
    }
    asc_sync_intra_wait(PIPE_MTE3, 0);
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  }
}
