// TileLang 0.1.15
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
extern "C" __global__ __cube__ void main_kernel(__gm__ fp8_e4_t* W, __gm__ uint16_t* WS, __gm__ fp8_e4_t* X, __gm__ uint16_t* XS, __gm__ bfloat16_t* Y, int32_t rows) {
  asc_init();
  __cbuf__ uint8_t *buf_dyn_l1 = (__cbuf__ uint8_t *)0;
  __cc__ float *total = (__cc__ float *)0;
  asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
  for (int32_t turn = 0; turn < ((((((rows + 63) >> 6) * 7) + 31) - ((int32_t)block_idx)) >> 5); ++turn) {
    for (int32_t step = 0; step < 20; ++step) {
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(4), 0);
      asc_copy_gm2l1_dn2nz(((__cbuf__ uint16_t*)buf_dyn_l1 + (((step & 1) * 1024) + 73728)), (&(WS[(((((turn * 32) + ((int32_t)block_idx)) % 7) * 20480) + (step * 4))])), 160, static_cast<asc_load_l2_cache_mode>(0), 4, 256, 0, 0);
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(256), 0);
      asc_copy_gm2l1_nd2nz(((__cbuf__ fp8_e4_t*)buf_dyn_l1 + ((step & 1) * 65536)), (&(W[(((((turn * 32) + ((int32_t)block_idx)) % 7) * 1310720) + (step * 256))])), 5120, static_cast<asc_load_l2_cache_mode>(0), 256, 256, 0, 0);
      asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
      asc_fill_l1((__cbuf__ uint16_t*)((__cbuf__ uint8_t*)((__cbuf__ fp8_e4_t*)buf_dyn_l1 + 131072) + (min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)) * 32)), (uint32_t)((uint32_t)0), { .repeat = static_cast<uint64_t>(8), .blk_num = static_cast<uint64_t>(max(0, (64 - max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)))), .dst_gap = static_cast<uint64_t>((64 - max(0, (64 - max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)))))});
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(64), 0);
      asc_copy_gm2l1_nd2nz(((__cbuf__ fp8_e4_t*)buf_dyn_l1 + 131072), (&(X[(((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)7) * (int64_t)327680) + (((int64_t)step) * (int64_t)256))])), 5120, static_cast<asc_load_l2_cache_mode>(0), min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)), 256, 0, 0);
      asc_set_gm2l1_nz_para(1, 1, static_cast<uint16_t>(4), 0);
      asc_copy_gm2l1_dn2nz(((__cbuf__ uint16_t*)buf_dyn_l1 + 75776), (&(XS[(((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)7) * (int64_t)5120) + (((int64_t)step) * (int64_t)4))])), 160, static_cast<asc_load_l2_cache_mode>(0), 4, min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)), 0, 0);
      asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
      if (step == 0) {
        asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
      }
      asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
      ascend_blockscaled_gemm_l1<64, 256, 256, 128, true, 4, float8_e4m3_t, uint16_t, float>(((__cc__ float*)total), ((__cbuf__ fp8_e4_t*)buf_dyn_l1 + 131072), ((__cbuf__ fp8_e4_t*)buf_dyn_l1 + ((step & 1) * 65536)), (__cbuf__ uint16_t*)(((__cbuf__ uint16_t*)buf_dyn_l1 + 75776)), (__cbuf__ uint16_t*)(((__cbuf__ uint16_t*)buf_dyn_l1 + (((step & 1) * 1024) + 73728))), (step == 0), 0, 0, 0);
      asc_sync_notify(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
      if (step == 19) {
        asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
      }
    }
    asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
    asc_set_l0c_copy_nz_para(1, 0, 0);
    asc_copy_l0c2gm((&(Y[(((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) / (int64_t)7) * (int64_t)114688) + ((((((int64_t)turn) * (int64_t)32) + ((int64_t)((int32_t)block_idx))) % (int64_t)7) * (int64_t)256))])), ((__cc__ float*)total), 256, min(64, max((rows - ((((turn * 32) + ((int32_t)block_idx)) / 7) * 64)), 0)), 1792, 64, static_cast<asc_store_l2_cache_mode>(0), static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(16), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
    asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
  }
  asc_sync_wait(PIPE_MTE1, PIPE_MTE2, static_cast<event_t>(0));
  asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
}
