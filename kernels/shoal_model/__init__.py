"""DeepSeek-V4.1-Flash on the operations of shoal_kernels."""
