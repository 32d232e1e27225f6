"""A start-up check that the compiled kernels still give the defined bits on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal_kernels.ops import hyper_connections, indexer, router, sampling
from shoal_kernels.ops.experts import ExpertWeights, experts
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.norm_rope import plain_rope_table, rms_norm_rope
from shoal_kernels.ops.sparse_attention import sparse_attention
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import SERVED
from shoal_kernels.row_formats import index_format, main_format

_ROWS = 7
Check = Callable[[Tensor, str | None], tuple[Tensor, ...]]


class KernelMismatch(RuntimeError):
    """A compiled kernel gave other bits than its reference, or a row depended on its batch: exactness does not hold."""


def self_test(device: torch.device | None = None) -> None:
    """Compare compiled kernels with the references, and rows alone with rows in a batch; raise KernelMismatch.

    Takes well under a second once the kernels are loaded. Where only the references can run, they are compared with
    themselves for row independence.
    """
    rows, order = torch.arange(_ROWS), torch.tensor([4, 0, 6, 2])
    for name, check in _checks():
        want = check(rows, "reference")
        got = check(rows, None)
        _compare(f"{name} differs from its reference", got, want)
        _compare(f"a row of {name} depends on its batch", check(order, None), tuple(part[order] for part in got))


def _compare(what: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            raise KernelMismatch(what)


def _checks() -> Iterator[tuple[str, Check]]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    x, weight = normal(_ROWS, 96), LinearWeight(normal(1, 96, 40), quantised=True)
    yield "linear", lambda rows, backend: (linear(x[rows], weight, precision=SERVED, backend=backend),)

    table, positions = plain_rope_table(16, 10000.0, 4096), torch.arange(_ROWS) * 100
    gain = normal(96)
    yield (
        "rms_norm_rope",
        lambda rows, backend: (
            rms_norm_rope(x[rows], gain, 1e-20, positions[rows], table, precision=SERVED, backend=backend),
        ),
    )

    streams = normal(_ROWS, 4, 32)
    mixing = hyper_connections.MixWeight.prepare(normal(24, 128), normal(3), normal(24))
    yield (
        "mix",
        lambda rows, backend: hyper_connections.mix(
            streams[rows], mixing, iterations=3, eps=1e-6, rms_eps=1e-20, precision=SERVED, backend=backend
        ),
    )

    logits, bias = normal(_ROWS, 6), normal(6)
    yield "route", lambda rows, backend: router.route(logits[rows], bias, 2, 1.5, precision=SERVED, backend=backend)

    ids, shares = router.route(logits, bias, 2, 1.5, precision=SERVED, backend="reference")
    pool = ExpertWeights(normal(6, 96, 64), normal(6, 32, 96))
    yield (
        "experts",
        lambda rows, backend: (
            experts(x[rows], ids[rows], shares[rows], pool, 10.0, precision=SERVED, backend=backend),
        ),
    )

    places = torch.arange(32)
    keys = PagedRows(torch.zeros(2, 16 * 34, dtype=torch.uint8), 0, 16, index_format(64, SERVED), page_split=True)
    keys.write(places // 16, places % 16, normal(32, 64))
    entries = PagedRows(torch.zeros(2, 16 * 36, dtype=torch.uint8), 0, 16, main_format(64, SERVED), page_split=False)
    entries.write(places // 16, places % 16, normal(32, 64))
    block_table, row_seq = torch.tensor([[1, 0]], dtype=torch.int32), torch.zeros(_ROWS, dtype=torch.int32)
    n_vis, query = torch.arange(_ROWS) * 5, normal(_ROWS, 2, 64)
    scale = normal(_ROWS, 2)

    def choose(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        arguments = query[rows], scale[rows], keys, block_table, row_seq[rows], n_vis[rows]
        return indexer.select_with_candidates(*arguments, 6, 2, 8, precision=SERVED, backend=backend)

    yield "indexer", choose

    topk, window, sink = choose(torch.arange(_ROWS), "reference")[0], normal(12, 64), normal(2)
    near = torch.arange(_ROWS)[:, None] + torch.arange(5)
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
            precision=SERVED,
            backend=backend,
        )
        return (out,)

    yield "sparse_attention", attend

    z, seeds = normal(_ROWS, 100), torch.arange(_ROWS) * 12345
    settings = sampling.RowSampling(temperature=0.8, top_p=0.9, top_k=20)

    def sample(rows: Tensor, backend: str | None) -> tuple[Tensor, ...]:
        kept = sampling.process_logits(z[rows], [settings] * rows.shape[0], backend=backend)
        greedy = torch.zeros(rows.shape[0], dtype=torch.bool)
        return kept, sampling.coupled_argmax(kept, seeds[rows], positions[rows], greedy, backend=backend)

    yield "sampling", sample
