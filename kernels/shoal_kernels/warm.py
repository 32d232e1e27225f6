"""Loading every compiled kernel up front."""

from __future__ import annotations

import importlib
import time

from shoal_kernels.registry import IMPLEMENTATIONS, Implementation


def warm() -> float:
    """Compile the CPU kernels, or load them from the cache; return the seconds it took.

    The first call after an installation or an update compiles (under a minute); later ones load. Without numba nothing
    happens: the references serve.
    """
    start = time.perf_counter()
    for module in sorted({_module(entry) for entries in IMPLEMENTATIONS.values() for entry in entries}):
        if module.endswith(".cpu"):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name not in ("numba", "llvmlite"):
                    raise
    return time.perf_counter() - start


def _module(entry: Implementation) -> str:
    return entry.target.partition(":")[0]
