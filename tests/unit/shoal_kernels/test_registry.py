"""The choice of implementations."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging

import pytest
from shoal_kernels import EXACT, SERVED, BackendUnavailable, registry
from shoal_kernels.registry import IMPLEMENTATIONS, Implementation, resolve


def test_served_runs_compiled_and_exact_runs_the_reference() -> None:
    for op, entries in IMPLEMENTATIONS.items():
        # What is fused on accelerators only is put together from compiled operations by its reference.
        is_fused = not any(entry.backend == "cpu" for entry in entries)
        assert resolve(op, "cpu", SERVED).__module__.endswith("reference" if is_fused else "cpu")
        assert resolve(op, "cpu", EXACT).__module__.endswith(".reference")


def test_a_named_backend_is_never_replaced() -> None:
    assert resolve("linear", "cpu", SERVED, "reference").__module__.endswith(".reference")
    with pytest.raises(BackendUnavailable, match="linear"):
        resolve("linear", "cpu", EXACT, "cpu")
    with pytest.raises(BackendUnavailable, match="'triton'"):
        resolve("linear", "cpu", SERVED, "triton")


def test_a_missing_compiler_falls_back_once_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Implementation("cpu", "shoal_kernels.no_such_module:linear", ("cpu",), ("served",))
    monkeypatch.setitem(IMPLEMENTATIONS, "linear", (broken, IMPLEMENTATIONS["linear"][-1]))
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "_logged", set())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert resolve("linear", "cpu", SERVED).__module__.endswith(".reference")
    assert [record.getMessage() for record in caplog.records] == ["kernel_backend_missing", "kernel_backend_chosen"]
    monkeypatch.setattr(registry, "_chosen", {})
    with pytest.raises(BackendUnavailable, match="no_such_module"):
        resolve("linear", "cpu", SERVED, "cpu")


def test_every_implementation_of_an_op_takes_the_same_arguments() -> None:
    for op, entries in IMPLEMENTATIONS.items():
        assert entries[-1].backend == "reference"
        signatures = set()
        for entry in entries:
            module, _, function = entry.target.partition(":")
            if entry.backend in ("triton", "tilelang") and not _is_installed(entry.backend, module):
                continue
            parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
            signatures.add(tuple(parameters))
        assert len(signatures) == 1, op


def _is_installed(backend: str, module: str) -> bool:
    return importlib.util.find_spec(backend) is not None and importlib.util.find_spec(module) is not None
