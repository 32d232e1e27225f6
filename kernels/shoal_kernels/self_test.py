"""A start-up check that the kernels still give what they are defined to give on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels import formats
from shoal_kernels.ops import hyper_connections, indexer, router, sampling
from shoal_kernels.ops.experts import ExpertWeights, experts
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.norm_rope import plain_rope_table, window_rows
from shoal_kernels.ops.sparse_attention import sparse_attention
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision
from shoal_kernels.row_formats import index_format, main_format, window_format

_ROWS = 7
# An accelerator adds in another order: values may differ by single roundings, and near ties may be decided otherwise.
_NEAR, _MOSTLY = 3e-2, 0.9
Check = Callable[[Tensor, str | None], tuple[Tensor, ...]]


class KernelMismatch(RuntimeError):
    """A kernel gave other values than its reference, or a row depended on its batch: exactness does not hold."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where checks run. Inputs are made in host memory, equal for every place."""

    precision: Precision
    device: torch.device

    def values(self, x: Tensor) -> Tensor:
        """Activations."""
        return x.to(self.precision.dtype).to(self.device)

    def linear_weight(self, x: Tensor) -> LinearWeight:
        """x [out, in] as FP8."""
        return LinearWeight.from_fp8(*self._fp8(x), keep_bytes=self.precision.keeps_bytes)

    def expert_weights(self, w1: Tensor, w3: Tensor, w2: Tensor) -> ExpertWeights:
        """[E, out, in] each, as FP4."""
        parts = [[self._fp4(expert) for expert in part] for part in (w1, w3, w2)]
        return ExpertWeights.from_fp4(*parts, keep_bytes=self.precision.keeps_bytes)

    def _fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        data = (x * 64.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = torch.full([-(-size // formats.WEIGHT_BLOCK) for size in x.shape], 127 - 6, dtype=torch.uint8)
        return data.to(self.device), scale.to(self.device)

    def _fp4(self, x: Tensor) -> tuple[Tensor, Tensor]:
        data, scale = formats.encode_q4ue(x * 2.0**-4)
        return data.to(self.device), scale.to(self.device)


def self_test(device: torch.device | str = "cpu") -> None:
    """Compare kernels with the references, and rows alone with rows in a batch; raise KernelMismatch.

    On the host every bit must be that of the reference; on an accelerator values must be near those of the host's
    references, and rows must have the same bits alone and in a batch. Takes well under a second on the host once the
    kernels are loaded. Where only the references can run, they are compared with themselves for row independence.
    """
    host, there = _Place(SERVED, torch.device("cpu")), torch.device(device)
    is_host = there.type == "cpu"
    place = host if is_host else _Place(SERVED_BF16, there)
    if not is_host:
        torch.cuda.set_device(there.index or 0)
    rows, order = torch.arange(_ROWS), torch.tensor([4, 0, 6, 2])
    for (name, reference), (_, check) in zip(_checks(host), _checks(place), strict=True):
        want, got = reference(rows, "reference"), check(rows.to(there), None)
        (_compare if is_host else _compare_nearly)(f"{name} differs from its reference", got, want)
        alone = check(order.to(there), None)
        _compare(f"a row of {name} depends on its batch", alone, tuple(part[order.to(there)] for part in got))


def _compare(what: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            raise KernelMismatch(what)


def _compare_nearly(what: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for part, other in zip(got, want, strict=True):
        one = part.cpu()
        if one.is_floating_point():
            # Tokens that cannot be sampled are -inf on both sides.
            finite = torch.isfinite(other)
            difference, norm = (one - other)[finite].norm(), other[finite].norm()
            is_near = bool(difference <= _NEAR * norm) and torch.equal(finite, torch.isfinite(one))
        else:
            is_near = float((one == other).float().mean()) >= _MOSTLY
        if one.shape != other.shape or not is_near:
            raise KernelMismatch(what)


def _checks(place: _Place) -> Iterator[tuple[str, Check]]:
    generator, precision, device = torch.Generator().manual_seed(1), place.precision, place.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    x, weight = place.values(normal(_ROWS, 96)), place.linear_weight(normal(64, 96))
    yield "linear", lambda rows, backend: (linear(x[rows], weight, precision=precision, backend=backend),)

    table, positions = plain_rope_table(16, 10000.0, 4096), torch.arange(_ROWS, device=device) * 100
    table.cover(4095, device, precision.wide)
    gain = normal(96).to(device)

    def offer(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        found = window_rows(x[rows], gain, 1e-20, positions[rows], table, precision=precision, backend=backend)
        return (window_format(96, precision).decode(found) if precision.keeps_bytes else found,)

    yield "window_rows", offer

    streams = place.values(normal(_ROWS, 4, 32))
    mixing = hyper_connections.MixWeight.prepare(
        *(part.to(device) for part in (normal(24, 128), normal(3), normal(24))), keep_bytes=precision.keeps_bytes
    )
    yield (
        "mix",
        lambda rows, backend: hyper_connections.mix(
            streams[rows], mixing, iterations=3, eps=1e-6, rms_eps=1e-20, precision=precision, backend=backend
        ),
    )

    logits, bias = normal(_ROWS, 6).to(device), normal(6).to(device)
    yield "route", lambda rows, backend: router.route(logits[rows], bias, 2, 1.5, precision=precision, backend=backend)

    ids, shares = (
        part.to(device)
        for part in router.route(logits.cpu(), bias.cpu(), 2, 1.5, precision=SERVED, backend="reference")
    )
    pool = place.expert_weights(normal(6, 32, 96), normal(6, 32, 96), normal(6, 96, 32))
    yield (
        "experts",
        lambda rows, backend: (
            experts(x[rows], ids[rows], shares[rows], pool, 10.0, precision=precision, backend=backend),
        ),
    )

    places = torch.arange(32, device=device)
    index, main = index_format(64, precision), main_format(64, precision)
    keys = PagedRows(torch.zeros(2, 16 * 34, dtype=torch.uint8, device=device), 0, 16, index, page_split=True)
    keys.write(places // 16, places % 16, place.values(normal(32, 64)))
    entries = PagedRows(torch.zeros(2, 16 * 36, dtype=torch.uint8, device=device), 0, 16, main, page_split=False)
    entries.write(places // 16, places % 16, place.values(normal(32, 64)))
    block_table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    row_seq = torch.zeros(_ROWS, dtype=torch.int32, device=device)
    n_vis, query = torch.arange(_ROWS, device=device) * 5, place.values(normal(_ROWS, 2, 64))
    scale = place.values(normal(_ROWS, 2))

    def choose(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        arguments = query[rows], scale[rows], keys, block_table, row_seq[rows], n_vis[rows]
        return indexer.select_with_candidates(*arguments, 6, 2, 8, precision=precision, backend=backend)

    yield "indexer", choose

    topk = choose(torch.arange(_ROWS, device=device), None)[0]
    window, sink = normal(12, 64), normal(2).to(device)
    held = window_format(64, SERVED).encode(window).to(device)
    window = held if precision.keeps_bytes else window_format(64, SERVED).decode(held)
    near = torch.arange(_ROWS, device=device)[:, None] + torch.arange(5, device=device)
    window_index = near.to(torch.int32)

    def attend(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        out = sparse_attention(
            query[rows],
            window,
            window_index[rows],
            sink,
            0.125,
            positions[rows],
            table,
            entries=entries,
            block_table=block_table,
            row_seq=row_seq[rows],
            topk=topk[rows],
            precision=precision,
            backend=backend,
        )
        return (out,)

    yield "sparse_attention", attend

    z, seeds = normal(_ROWS, 100).to(device), torch.arange(_ROWS, device=device) * 12345
    settings = sampling.RowSampling(temperature=0.8, top_p=0.9, top_k=20)

    def sample(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        kept = sampling.process_logits(z[rows], [settings] * rows.shape[0], backend=backend)
        greedy = torch.zeros(rows.shape[0], dtype=torch.bool, device=device)
        return kept, sampling.coupled_argmax(kept, seeds[rows], positions[rows], greedy, backend=backend)

    yield "sampling", sample
