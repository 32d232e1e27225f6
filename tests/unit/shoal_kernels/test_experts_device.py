"""experts and moe on an accelerator, or in Triton's interpreter: near the host's, every row for itself."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16
from shoal_kernels.ops.experts import ExpertWeights, experts, moe
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, backends, needs_device, relative_error
from support.seldom import seldom

BACKENDS = backends(tilelang=True)
Stored = tuple[torch.Tensor, torch.Tensor]


class Layer:
    """Random weights of one layer, in the form of the host and in that of the device."""

    def __init__(self, experts: int, dim: int, inner: int, *, seed: int = 0, where: str = "cpu") -> None:
        self.generator = torch.Generator(where).manual_seed(seed)
        self.where, self.experts, self.dim = where, experts, dim
        w1, w3 = ([self._fp4(inner, dim) for _ in range(experts)] for _ in range(2))
        w2 = [self._fp4(dim, inner) for _ in range(experts)]
        shared = self._fp8(inner, dim), self._fp8(inner, dim), self._fp8(dim, inner)
        self.host = ExpertWeights.from_fp4(w1, w3, w2), ExpertWeights.from_fp8(*shared)
        routed, one = [[_on_device(pair) for pair in part] for part in (w1, w3, w2)], [_on_device(p) for p in shared]
        self.device = ExpertWeights.from_fp4(*routed, keep_bytes=True), ExpertWeights.from_fp8(*one, keep_bytes=True)

    def _fp4(self, out: int, size: int) -> Stored:
        return self._bytes(0, 256, out, size // 2), self._bytes(118, 124, out, size // 32)

    def _fp8(self, out: int, size: int) -> Stored:
        data = torch.randn(out, size, generator=self.generator, device=self.where).to(torch.float8_e4m3fn)
        return data, self._bytes(120, 124, -(-out // 32), -(-size // 32))

    def _bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.where, dtype=torch.uint8)

    def inputs(self, rows: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x bfloat16, ids, weights on the device."""
        x = torch.randn(rows, self.dim, generator=self.generator, device=self.where)
        scores = torch.rand(rows, self.experts, generator=self.generator, device=self.where)
        ids = scores.argsort(1)[:, :top_k].to(torch.int32)
        weights = torch.rand(rows, top_k, generator=self.generator, device=self.where) + 0.1
        return x.to(torch.bfloat16).to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def _on_device(pair: Stored) -> Stored:
    return pair[0].to(DEVICE), pair[1].to(DEVICE)


def _host(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    args = x.float().cpu(), ids.cpu(), weights.cpu()
    routed, shared = layer.host
    return experts(*args, routed, 10.0, precision=SERVED), moe(*args, routed, shared, 10.0, precision=SERVED)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dim", "inner", "top_k", "rows"), [(64, 32, 2, 9), *seldom((320, 96, 1, 3), (128, 64, 3, 17))]
)
def test_outputs_are_those_of_the_host(backend: str, dim: int, inner: int, top_k: int, rows: int) -> None:
    layer = Layer(5, dim, inner, seed=dim)
    x, ids, weights = layer.inputs(rows, top_k)
    x[0], x[1] = 0, x[1] * 1e4
    routed, shared = layer.device
    want_routed, want = _host(layer, x, ids, weights)
    got_routed = experts(x, ids, weights, routed, 10.0, precision=SERVED_BF16, backend=backend)
    got = moe(x, ids, weights, routed, shared, 10.0, precision=SERVED_BF16, backend=backend)
    assert (got_routed.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    for row in range(rows):
        assert relative_error(got_routed[row], want_routed[row]) < 1e-2
        assert relative_error(got[row], want[row]) < 1e-2


def test_the_products_of_whole_blocks_are_those_of_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(3, 64, 32, seed=5)
    x, ids, weights = layer.inputs(4, 2)
    want = moe(x, ids, weights, *layer.device, 10.0, precision=SERVED_BF16, backend="triton")
    monkeypatch.setattr("shoal_kernels.ops.experts.triton._joins_planes", lambda device: True)
    got = moe(x, ids, weights, *layer.device, 10.0, precision=SERVED_BF16, backend="triton")
    assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    layer = Layer(4, 64, 32, seed=3)
    routed, shared = layer.device
    x, ids, weights = layer.inputs(5, 2)
    assert_rows_independent(
        lambda rows: moe(
            x[rows], ids[rows], weights[rows], routed, shared, 10.0, precision=SERVED_BF16, backend=backend
        ),
        5,
        sizes=(3,),
    )


@needs_device
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "most", "counts"), [("triton", 48, (1, 6)), ("tilelang", 1536, (*range(1, 41), 48, 100, 360))]
)
def test_a_row_does_not_depend_on_how_many_rows_its_expert_receives(
    backend: str, most: int, counts: tuple[int, ...]
) -> None:
    layer = Layer(3, 5120, 2304, seed=6, where=DEVICE)
    routed, shared = layer.device
    x, _, weights = layer.inputs(3 * most, 1)
    ids = (torch.arange(3 * most, device=DEVICE, dtype=torch.int32) % 3)[:, None]

    def run(rows: torch.Tensor) -> torch.Tensor:
        given = x[rows], ids[rows], weights[rows]
        return moe(*given, routed, shared, 10.0, precision=SERVED_BF16, backend=backend)

    whole = run(torch.arange(3 * most, device=DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(7)
    for count in counts:
        # The first row moves to another place of its tile each time; the second expert has fewer rows than the others.
        first = 3 * torch.randperm(most, generator=generator, device=DEVICE)[:count]
        rows = torch.cat((first, first[: count // 2] + 1, first + 2))
        assert_equal_bits(run(rows), whole[rows])


@needs_device
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "rows"), [("triton", 48), ("tilelang", 1), ("tilelang", 48), ("tilelang", 200)])
def test_released_widths_give_the_outputs_of_the_host(backend: str, rows: int) -> None:
    layer = Layer(6, 5120, 2304, seed=8, where=DEVICE)
    x, ids, weights = layer.inputs(rows, 6)
    got = moe(x, ids, weights, *layer.device, 10.0, precision=SERVED_BF16, backend=backend)
    some = slice(0, 3)
    want = moe(x[some].float(), ids[some], weights[some], *layer.host, 10.0, precision=SERVED, backend="reference")
    for row in range(min(rows, 3)):
        assert relative_error(got[row], want[row]) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_the_chosen_experts_does_not_matter(backend: str) -> None:
    layer = Layer(4, 64, 32, seed=4)
    x, ids, weights = layer.inputs(5, 3)
    one, other = (
        experts(x, i, w, layer.device[0], 10.0, precision=SERVED_BF16, backend=backend)
        for i, w in ((ids, weights), (ids.flip(1), weights.flip(1)))
    )
    assert_equal_bits(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_no_rows(backend: str) -> None:
    layer = Layer(3, 64, 32)
    x, ids, weights = layer.inputs(0, 2)
    routed, shared = layer.device
    assert experts(x, ids, weights, routed, 10.0, precision=SERVED_BF16, backend=backend).shape == (0, 64)
    assert moe(x, ids, weights, routed, shared, 10.0, precision=SERVED_BF16, backend=backend).shape == (0, 64)


def test_scales_beyond_the_multipliers_are_refused() -> None:
    data, scale = torch.zeros(32, 16, dtype=torch.uint8), torch.full((32, 1), 129, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scale byte 129 of an expert weight exceeds 128"):
        ExpertWeights.from_fp4([(data, scale)], [(data, scale)], [(data, scale)], keep_bytes=True)
    wide, blocks = torch.zeros(32, 32, dtype=torch.uint8), torch.full((1, 1), 135, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scale byte 135 of an expert weight exceeds 134"):
        ExpertWeights.from_fp8((wide, blocks), (wide, blocks), (wide, blocks), keep_bytes=True)
