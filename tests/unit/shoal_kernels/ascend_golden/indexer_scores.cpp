// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
__simt_vf__ __launch_bounds__(64) inline void main_kernel_simt_vf_0(__ubuf__ uint8_t* buf_dyn_shmem, int32_t keys_version_counter_1) {
  float total = float(0x0p+0f/*0.000000e+00*/);
  total = float(0x0p+0f/*0.000000e+00*/);
  for (int32_t h = 0; h < 32; ++h) {
    total = (total + (((__ubuf__ float*)buf_dyn_shmem)[(h + 4160)] * max(((__ubuf__ float*)buf_dyn_shmem)[((((keys_version_counter_1 & 1) * 2048) + (h * 64)) + ((int32_t)threadIdx.x))], float(0x0p+0f/*0.000000e+00*/))));
  }
  ((__ubuf__ bfloat16_t*)buf_dyn_shmem)[((((keys_version_counter_1 & 1) * 64) + ((int32_t)threadIdx.x)) + 8192)] = ((bfloat16_t)total);
}

extern "C" __global__ __mix__(1, 2) void main_kernel(__gm__ float4_e2m1x2_t* K, __gm__ uint16_t* KS, __gm__ float4_e2m1x2_t* Q, __gm__ uint16_t* QS, __gm__ bfloat16_t* Y, __gm__ int32_t* blocks, __gm__ int32_t* n_vis, __gm__ int32_t* row_seq, __gm__ float* weights, int32_t key_stride, int32_t longest, int32_t most, int32_t pages, int32_t rows, int32_t scale_stride, int32_t sequences) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __ubuf__ uint8_t *buf_dyn_shmem = (__ubuf__ uint8_t *)0;
  __cc__ float *dots = (__cc__ float *)0;
  int32_t keys_version_counter_1 = 0;
  if ASC_IS_AIC {
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(1));
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(1));
    asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(2));
    keys_version_counter_1 = 0;
    for (int32_t turn = 0; turn < (((rows + 31) - ((int32_t)block_idx)) >> 5); ++turn) {
      int32_t sequence = row_seq[((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx)))];
      int32_t visible = n_vis[((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx)))];
      asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(2));
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(2), 0);
      asc_copy_gm2l1_dn2nz(((__cbuf__ uint16_t*)buf_dyn_l1 + 9728), (&(QS[((((int64_t)turn) * (int64_t)2048) + (((int64_t)((int32_t)block_idx)) * (int64_t)64))])), 4, static_cast<asc_load_l2_cache_mode>(0), 2, 32, 0, 0);
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(32), 0);
      asc_copy_gm2l1_nd2nz((__cbuf__ int8_t*)(((__cbuf__ float4_e2m1x2_t*)buf_dyn_l1 + 16384)), (__gm__ int8_t*)((&(((__gm__ float4_e2m1x2_t*)Q)[((((int64_t)turn) * (int64_t)65536) + (((int64_t)((int32_t)block_idx)) * (int64_t)2048))]))), 64, static_cast<asc_load_l2_cache_mode>(0), 32, 64, 0, 0);
      asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(2));
      asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(2));
      for (int32_t block = 0; block < ((visible + 127) >> 7); ++block) {
        int32_t condval;
        if ((((sequence < sequences) && (0 <= sequence)) && (block < most))) {
          condval = blocks[((((int64_t)sequence) * ((int64_t)most)) + ((int64_t)block))];
        } else {
          condval = 0;
        }
        int32_t at = condval;
        asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>((keys_version_counter_1 & 1)));
        if (0 < (pages - at)) {
          asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(128), 0);
          asc_copy_gm2l1_nd2nz((__cbuf__ int8_t*)(((__cbuf__ float4_e2m1x2_t*)buf_dyn_l1 + ((keys_version_counter_1 & 1) * 8192))), (__gm__ int8_t*)((&(((__gm__ float4_e2m1x2_t*)K)[((((int64_t)at) * ((int64_t)key_stride)) >> (int64_t)1)]))), 64, static_cast<asc_load_l2_cache_mode>(0), 128, 64, 0, 0);
          asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(2), 0);
          asc_copy_gm2l1_dn2nz(((__cbuf__ uint16_t*)buf_dyn_l1 + (((keys_version_counter_1 & 1) * 256) + 9216)), (&(KS[(((int64_t)at) * ((int64_t)scale_stride))])), 4, static_cast<asc_load_l2_cache_mode>(0), 2, 128, 0, 0);
        }
        asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>((keys_version_counter_1 & 1)));
        ascend_blockscaled_gemm_l1<32, 128, 128, 128, true, 2, float4_e2m1x2_t, uint16_t, float>(((__cc__ float*)dots + ((keys_version_counter_1 & 1) * 4096)), ((__cbuf__ float4_e2m1x2_t*)buf_dyn_l1 + 16384), ((__cbuf__ float4_e2m1x2_t*)buf_dyn_l1 + ((keys_version_counter_1 & 1) * 8192)), (__cbuf__ uint16_t*)(((__cbuf__ uint16_t*)buf_dyn_l1 + 9728)), (__cbuf__ uint16_t*)(((__cbuf__ uint16_t*)buf_dyn_l1 + (((keys_version_counter_1 & 1) * 256) + 9216))), (bool)1, 0, 0, 0);
        asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_intra_wait(PIPE_FIX, ((keys_version_counter_1 & 1) + 16));
        asc_sync_intra_wait(PIPE_FIX, (keys_version_counter_1 & 1));
        asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_set_l0c_copy_nz_para(1, 0, 0);
        asc_copy_l0c2ub((&(((__ubuf__ float*)buf_dyn_shmem)[((keys_version_counter_1 & 1) * 2048)])), ((__cc__ float*)dots + ((keys_version_counter_1 & 1) * 4096)), 128, 32, 64, 32, 0, static_cast<asc_dual_dst_mode>(2), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
        asc_sync_intra_arrive(PIPE_FIX, ((keys_version_counter_1 & 1) + 2));
        asc_sync_intra_arrive(PIPE_FIX, ((keys_version_counter_1 & 1) + 18));
        asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>((keys_version_counter_1 & 1)));
        keys_version_counter_1 = (keys_version_counter_1 + 1);
      }
      asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(2));
    }
    asc_sync_intra_wait(PIPE_FIX, 0);
    asc_sync_intra_wait(PIPE_FIX, 1);
    asc_sync_intra_wait(PIPE_FIX, 16);
    asc_sync_intra_wait(PIPE_FIX, 17);
    asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
    asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(1));
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(1));
    asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(2));
  }
  if ASC_IS_AIV {
    int32_t sid = asc_get_sub_block_id();
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_intra_arrive(PIPE_V, 0);
    asc_sync_intra_arrive(PIPE_V, 1);
    asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    keys_version_counter_1 = 0;
    for (int32_t turn_1 = 0; turn_1 < (((rows + 31) - ((int32_t)block_idx)) >> 5); ++turn_1) {
      int32_t visible_1 = n_vis[((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx)))];
      asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
      asc_copy_gm2ub_align((__ubuf__ uint8_t*)((&(((__ubuf__ float*)buf_dyn_shmem)[4160]))), (__gm__ uint8_t*)((&(weights[((((int64_t)turn_1) * (int64_t)1024) + (((int64_t)((int32_t)block_idx)) * (int64_t)32))]))), 1, 128, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 128, 128);
      asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
      asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
      for (int32_t block_1 = 0; block_1 < ((visible_1 + 127) >> 7); ++block_1) {
        asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_intra_wait(PIPE_V, ((keys_version_counter_1 & 1) + 2));
        asc_vf_call<main_kernel_simt_vf_0>(cce::dim3(64), buf_dyn_shmem, keys_version_counter_1);
        asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>((keys_version_counter_1 & 1)));
        asc_sync_intra_arrive(PIPE_V, (keys_version_counter_1 & 1));
        asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>((keys_version_counter_1 & 1)));
        if (0 < ((longest - (sid * 64)) - (block_1 * 128))) {
          asc_copy_ub2gm_align((__gm__ uint8_t*)((&(Y[(((((int64_t)block_1) * (int64_t)128) + (((int64_t)sid) * (int64_t)64)) + (((((int64_t)turn_1) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) * ((int64_t)longest)))]))), (__ubuf__ uint8_t*)((&(((__ubuf__ bfloat16_t*)buf_dyn_shmem)[(((keys_version_counter_1 & 1) * 64) + 8192)]))), 1, (min(64, ((longest - (sid * 64)) - (block_1 * 128))) * 2), static_cast<asc_store_l2_cache_mode>(0), (min(64, ((longest - (sid * 64)) - (block_1 * 128))) * 2), (min(64, ((longest - (sid * 64)) - (block_1 * 128))) * 2));
        }
        asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>((keys_version_counter_1 & 1)));
        keys_version_counter_1 = (keys_version_counter_1 + 1);
      }
      asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    }
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(1));
    asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  }
}
