"""The number formats of the Ascend kernels, evaluated with numpy in place of TileLang, against `formats`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from shoal_kernels import formats

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs TileLang")


class _Numpy:
    """The few operations that the expressions use, on arrays."""

    float32 = staticmethod(np.float32)
    max = staticmethod(np.maximum)
    min = staticmethod(np.minimum)
    abs = staticmethod(np.abs)

    @staticmethod
    def cast(x: Any, dtype: str) -> Any:
        return np.asarray(x).astype(dtype)

    @staticmethod
    def reinterpret(x: Any, dtype: str) -> Any:
        x = np.asarray(x)
        return (x.astype(np.int32) if x.dtype.kind == "i" else x.astype(np.float32)).view(dtype)

    @staticmethod
    def if_then_else(condition: Any, yes: Any, no: Any) -> Any:
        return np.where(condition, yes, no)


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from shoal_kernels import ascend_lib

    monkeypatch.setattr(ascend_lib, "T", _Numpy)
    with np.errstate(all="ignore"):
        yield ascend_lib


def _bytes(count: int = 256) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(count, dtype=np.int32)


def test_ascend_decodes_every_byte_as_the_formats_say(lib: ModuleType) -> None:
    codes = _bytes()
    stored = torch.from_numpy(codes.astype(np.uint8))
    e4m3, want = lib.e4m3(codes), formats.decode_e4m3(stored).numpy()
    is_number = ~np.isnan(want)  # 0x7F and 0xFF, which no cast writes
    assert np.array_equal(e4m3[is_number].view(np.int32), want[is_number].view(np.int32))
    assert np.array_equal(lib.ue8m0(codes[:255]), formats.decode_ue8m0(stored).numpy()[:255])
    pairs = formats.decode_e2m1(stored).numpy()
    assert np.array_equal(lib.e2m1(lib.nibble(codes, 0)).view(np.int32), pairs[0::2].view(np.int32))
    assert np.array_equal(lib.e2m1(lib.nibble(codes, 1)).view(np.int32), pairs[1::2].view(np.int32))


def test_ascend_encodes_e2m1_as_the_formats_say(lib: ModuleType) -> None:
    x = torch.cat((torch.arange(-64, 65) / 8.0, torch.randn(999, generator=torch.Generator().manual_seed(1)) * 3.0))
    x = torch.cat((x, torch.tensor([-0.0, 0.0])))
    x = x[: x.shape[0] // 2 * 2]
    packed = formats.encode_e2m1(x).numpy().astype(np.int32)
    codes = lib.e2m1_code(x.numpy())
    assert np.array_equal(codes[0::2] | (codes[1::2] << 4), packed)


def test_ascend_scales_are_those_of_the_casts(lib: ModuleType) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(500, 32, generator=generator) * torch.exp(torch.randn(500, 1, generator=generator) * 6.0)
    x[0], x[1] = 0.0, torch.tensor(448.0)
    amax = x.abs().amax(1).numpy()
    for floor, largest, encode in (
        (lib.Q8_FLOOR, lib.E4M3_MAX, formats.encode_q8),
        (lib.Q4UE_FLOOR, lib.E2M1_MAX, formats.encode_q4ue),
    ):
        byte = lib.power_of_two_byte(amax, floor, largest)
        assert np.array_equal(byte, encode(x)[1].numpy()[:, 0].astype(np.int32))
        assert np.array_equal(lib.inverse_of_byte(byte) * lib.ue8m0(byte), np.ones(500, np.float32))
