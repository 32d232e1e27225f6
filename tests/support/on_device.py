"""Where kernel tests run: on the CUDA device if there is one, else on the host in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

HAS_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if HAS_DEVICE else "cpu"

needs_device = pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")


def backends(*, tilelang: bool = False) -> list[str]:
    """The backends of an op that can run here; TileLang has no interpreter."""
    return ["triton", "tilelang"] if tilelang and HAS_DEVICE else ["triton"]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`, in float64 on the host; NaN never passes a comparison."""
    difference, reference = got.double().cpu() - want.double().cpu(), want.double().cpu()
    return float(difference.norm() / reference.norm().clamp_min(1e-30))


def assert_equal_bits(got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    """Equal shapes, dtypes and bits."""
    pairs = zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        left, right = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        different = int((left != right).sum())
        assert different == 0, f"{different} of {left.numel()} bytes differ"


def assert_rows_independent(
    operation: Callable[[Tensor], Tensor | tuple[Tensor, ...]], rows: int, *, sizes: tuple[int, ...] = (1, 2, 3, 5, 6)
) -> None:
    """operation(row indices int64 on DEVICE) must give a row the same bits alone, permuted and in parts."""
    everything = torch.arange(rows, device=DEVICE)
    whole = _as_tuple(operation(everything))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    assert_equal_bits(_as_tuple(operation(order)), tuple(part[order] for part in whole))
    for size in sizes:
        for first in range(0, rows, max(size, rows // 3)):
            chosen = everything[first : first + size]
            assert_equal_bits(_as_tuple(operation(chosen)), tuple(part[chosen] for part in whole))


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
