"""The operations of the model: contracts, reference and fast implementations."""

from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import EXACT, KV, SERVED, SERVED_BF16, Precision
from shoal_kernels.registry import BackendUnavailable, resolve
from shoal_kernels.row_formats import RecordKind, RowFormat, index_format, main_format, window_format
from shoal_kernels.self_test import KernelMismatch, self_test
from shoal_kernels.threads import get_num_threads, set_num_threads
from shoal_kernels.warm import warm

__all__ = [
    "EXACT",
    "KV",
    "SERVED",
    "SERVED_BF16",
    "BackendUnavailable",
    "KernelMismatch",
    "PagedRows",
    "Precision",
    "RecordKind",
    "RowFormat",
    "get_num_threads",
    "index_format",
    "main_format",
    "resolve",
    "self_test",
    "set_num_threads",
    "warm",
    "window_format",
]
