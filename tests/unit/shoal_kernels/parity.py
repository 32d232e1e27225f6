"""Inputs and comparisons for tests that hold a compiled path to the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from shoal_kernels import threads
from torch import Tensor

ROW_COUNTS = (0, 1, 2, 3, 7, 16, 70)
Operation = Callable[..., Tensor | tuple[Tensor, ...]]


def values(*shape: int, seed: int, bf16: bool = True) -> Tensor:
    """Random float32 with zeros, negative zeros, ties, huge and tiny rows mixed in; bfloat16 values if asked."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    kind = torch.randint(0, 24, shape, generator=generator)
    x = torch.where(kind == 0, 0.0, x)
    x = torch.where(kind == 1, -0.0, x)
    x = torch.where(kind == 2, 1.0, x)
    x = torch.where(kind == 3, x * 1e4, x)
    x = torch.where(kind == 4, x * 1e-6, x)
    if len(shape) > 1 and shape[0] > 4:
        x[1] = 0.0
        x[2] = x[2] * 1e-30
        x[3] = x[0]
        x[4] = -0.0
    return x.to(torch.bfloat16).to(torch.float32) if bf16 else x


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Plain random float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_same_bits(got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    """Equal shapes, dtypes and bits."""
    pairs = zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        left, right = one.contiguous(), other.contiguous()
        if one.dtype == torch.float32:
            left, right = left.view(torch.int32), right.view(torch.int32)
        different = int((left != right).sum())
        assert different == 0, f"{different} of {left.numel()} values differ"


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run with `count` kernel threads."""
    threads.set_num_threads(count)
    try:
        yield
    finally:
        threads.set_num_threads(1)


def assert_rows_independent(operation: Callable[[Tensor], Tensor | tuple[Tensor, ...]], rows: int) -> None:
    """operation(row indices) must give each row the same bits alone, permuted, in parts, and with two threads."""
    whole = _as_tuple(operation(torch.arange(rows)))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    assert_same_bits(_as_tuple(operation(order)), tuple(part[order] for part in whole))
    for size in (1, 3, 7):
        for first in range(0, rows, max(size, rows // 3)):
            chosen = torch.arange(first, min(first + size, rows))
            assert_same_bits(_as_tuple(operation(chosen)), tuple(part[chosen] for part in whole))
    with num_threads(2):
        assert_same_bits(_as_tuple(operation(torch.arange(rows))), whole)


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def packed(allowed: Tensor) -> Tensor:
    """A bool mask as words of 32 bits."""
    bits = torch.zeros(-(-allowed.numel() // 32) * 32, dtype=torch.int64)
    bits[: allowed.numel()] = allowed
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
