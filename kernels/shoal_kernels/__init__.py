"""The operations of the model: contracts, reference and fast implementations."""

from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import EXACT, KV, SERVED, Precision
from shoal_kernels.registry import BackendUnavailable, resolve
from shoal_kernels.row_formats import RecordKind, RowFormat, index_format, main_format, window_format

__all__ = [
    "EXACT",
    "KV",
    "SERVED",
    "BackendUnavailable",
    "PagedRows",
    "Precision",
    "RecordKind",
    "RowFormat",
    "index_format",
    "main_format",
    "resolve",
    "window_format",
]
