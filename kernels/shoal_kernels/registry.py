"""The only place that chooses an implementation of an operation.

The table lists implementations fastest first, the reference last, as "module:function" strings that are imported when
chosen: importing shoal_kernels needs neither numba nor a GPU stack.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_kernels.precision import Precision

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]


class BackendUnavailable(RuntimeError):
    """The backend a caller named cannot run this operation here."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One entry of the table: where it runs and which precisions it computes."""

    backend: str
    target: str
    device_types: tuple[str, ...] | None
    precisions: tuple[str, ...] | None

    def serves(self, device_type: str, precision: Precision) -> bool:
        """Whether this implementation is meant for the device and the precision."""
        on_device = self.device_types is None or device_type in self.device_types
        return on_device and (self.precisions is None or precision.name in self.precisions)


_ON_HOST, _ON_DEVICE = ("exact", "kv", "served"), ("served_bf16",)
# Triton's interpreter runs its kernels on host tensors, which is how tests run them without a GPU.
_DEVICE_TYPES = {"tilelang": ("cuda",), "triton": ("cuda", "cpu")}
# Functions with an Ascend kernel that is a whole operation. They are lowered in tests, and have run nowhere.
_ON_NPU = ("linear", "mix", "rms_norm", "rms_norm_rope", "route")


def _entry(
    op: str, function: str, *precisions: str, device: tuple[str, ...] = ("triton",)
) -> tuple[Implementation, ...]:
    module = f"shoal_kernels.ops.{op}"
    return (
        *(
            Implementation(backend, f"{module}.{backend}:{function}", _DEVICE_TYPES[backend], _ON_DEVICE)
            for backend in device
        ),
        *(
            (Implementation("ascend", f"{module}.ascend:{function}", ("npu",), _ON_DEVICE),)
            if function in _ON_NPU
            else ()
        ),
        Implementation("cpu", f"{module}.cpu:{function}", ("cpu",), precisions or ("served",)),
        Implementation("reference", f"{module}.reference:{function}", None, _ON_HOST),
    )


def _fused(op: str, function: str, *, device: tuple[str, ...] = ("triton",)) -> tuple[Implementation, ...]:
    """One kernel where bytes are kept; on the host its reference puts together the operations that exist there."""
    module = f"shoal_kernels.ops.{op}"
    return (
        *(
            Implementation(backend, f"{module}.{backend}:{function}", _DEVICE_TYPES[backend], _ON_DEVICE)
            for backend in device
        ),
        Implementation("reference", f"{module}.reference:{function}", None, _ON_HOST),
    )


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "cast_q8": _entry("cast", "cast_q8"),
    "cast_q4ue": _entry("cast", "cast_q4ue"),
    "encode_records": _entry("records", "encode_records"),
    "decode_records": _entry("records", "decode_records"),
    "write_records": _entry("records", "write_records"),
    "copy_rows": _fused("records", "copy_rows"),
    "linear": _entry("linear", "linear", device=("tilelang", "triton")),
    "rms_norm": _entry("norm_rope", "rms_norm"),
    "rms_norm_rope": _entry("norm_rope", "rms_norm_rope"),
    "rope": _entry("norm_rope", "rope"),
    "rms_norm_cast": _fused("norm_rope", "rms_norm_cast"),
    "rope_cast": _fused("norm_rope", "rope_cast"),
    "window_rows": _fused("norm_rope", "window_rows"),
    "latents": _fused("norm_rope", "latents"),
    "mix": _entry("hyper_connections", "mix"),
    "collapse": _entry("hyper_connections", "collapse"),
    "collapse_norm": _entry("hyper_connections", "collapse_norm"),
    "collapse_norm_cast": _entry("hyper_connections", "collapse_norm_cast"),
    "expand": _entry("hyper_connections", "expand"),
    "expand_norm": _entry("hyper_connections", "expand_norm"),
    "engram_gather": _entry("engram", "engram_gather"),
    "engram_gate": _entry("engram", "engram_gate"),
    "pool_pairs": _entry("compressor", "pool_pairs"),
    "store_main": _fused("compressor", "store_main"),
    "store_key": _fused("compressor", "store_key"),
    "route": _entry("router", "route"),
    "experts": _entry("experts", "experts", device=("tilelang", "triton")),
    "moe": _entry("experts", "moe", device=("tilelang", "triton")),
    "indexer_scores": _entry("indexer", "indexer_scores", device=("tilelang", "triton")),
    "indexer_select": _entry("indexer", "indexer_select", device=("tilelang", "triton")),
    "sparse_attention": _entry("sparse_attention", "sparse_attention", device=("tilelang", "triton")),
    "edit_logits": _entry("sampling", "edit_logits"),
    "filter_logits": _entry("sampling", "filter_logits"),
    "logprobs": _entry("sampling", "logprobs"),
    "coupled_argmax": _entry("sampling", "coupled_argmax"),
    "coupled_margins": _entry("sampling", "coupled_margins", device=()),
    "lm_head_argmax": _fused("lm_head", "lm_head_argmax", device=("tilelang", "triton")),
    "markov_loop": _fused("lm_head", "markov_loop"),
}

_chosen: dict[tuple[str, str, str, str | None], Kernel] = {}
_logged: set[str] = set()


def resolve(op: str, device_type: str, precision: Precision, backend: str | None = None) -> Kernel:
    """The implementation of `op` for a device type ("cpu", "cuda") and a precision.

    Without `backend` the first implementation that serves them and can be imported is taken, and logged once per op. A
    backend named by the caller is never replaced by another. Raises BackendUnavailable, KeyError for an unknown op.
    """
    key = (op, device_type, precision.name, backend)
    kernel = _chosen.get(key)
    if kernel is None:
        kernel = _chosen[key] = _load(op, device_type, precision, backend)
    return kernel


def backends(device_type: str, precision: Precision) -> dict[str, str]:
    """Which backend serves each operation here, by name of the operation. Raises BackendUnavailable.

    What runs on the host alone (the margins that a planner reads) decides no bits of an accelerator and is left out.
    """
    found = {}
    for op, entries in IMPLEMENTATIONS.items():
        if not any(entry.serves(device_type, precision) for entry in entries):
            continue
        kernel = resolve(op, device_type, precision)
        found[op] = next(entry.backend for entry in entries if _names(entry, kernel))
    return found


def _names(entry: Implementation, kernel: Kernel) -> bool:
    module_name, _, function = entry.target.partition(":")
    return module_name in sys.modules and getattr(sys.modules[module_name], function, None) is kernel


def _load(op: str, device_type: str, precision: Precision, backend: str | None) -> Kernel:
    for entry in IMPLEMENTATIONS[op]:
        if backend is not None and entry.backend != backend:
            continue
        if not entry.serves(device_type, precision):
            continue
        module_name, _, function = entry.target.partition(":")
        try:
            kernel: Kernel = getattr(importlib.import_module(module_name), function)
        except ImportError as error:
            if backend is not None:
                raise BackendUnavailable(f"backend {backend!r} of {op} cannot be loaded: {error}") from error
            _log_once(op, logging.WARNING, "kernel_backend_missing", entry.backend, str(error))
            continue
        if backend is None:
            _log_once(op, logging.INFO, "kernel_backend_chosen", entry.backend, precision.name)
        return kernel
    raise BackendUnavailable(f"no backend {backend or ''!r} of {op} for {device_type} in precision {precision.name}")


def _log_once(op: str, level: int, event: str, backend: str, detail: str) -> None:
    key = f"{op}/{event}/{backend}"
    if key not in _logged:
        _logged.add(key)
        logger.log(level, event, extra={"op": op, "backend": backend, "detail": detail})
