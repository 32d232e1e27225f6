"""A model is served only where the kernels give the bits that they are defined to give."""

from __future__ import annotations

import pytest
from shoal_engine.served_model import ServedModel
from shoal_kernels import KernelMismatch, registry
from support.tiny_model import TINY


def test_a_machine_whose_kernels_give_other_bits_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = registry.resolve

    def off_by_a_bit(op: str, *arguments: object) -> object:
        found = resolve(op, *arguments)  # type: ignore[arg-type]
        if op != "linear" or "reference" in arguments:
            return found
        return lambda *args, **kwargs: found(*args, **kwargs) + 2.0**-20

    monkeypatch.setattr("shoal_kernels.ops.linear.resolve", off_by_a_bit)
    with pytest.raises(KernelMismatch, match="linear"):
        ServedModel.load(TINY, block_count=4, slot_count=1)
