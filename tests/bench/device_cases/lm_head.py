"""From hidden rows to tokens at released sizes: the fused head, the Markov loop, and rows that need their logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16
from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.ops.lm_head import lm_head_argmax, markov_loop
from shoal_kernels.ops.sampling import RowSampling, coupled_argmax, process_logits
from torch import Tensor

VOCAB, DEPTH, RANK, DRAFTS = 129280, 5120, 256, 5
REQUESTS = (8, 60, 256)
ROWS_PER_REQUEST = 6
_DEVICE = "cuda"


def cases() -> Iterator[Case]:
    """Sampled at T = 1 and greedy; the weights alone exceed the L2 cache, so one set of inputs does."""
    weight = _normal(VOCAB, DEPTH)
    head = LinearWeight.from_bf16(weight, keep_bytes=True)
    for requests in REQUESTS:
        rows = requests * ROWS_PER_REQUEST
        hidden = torch.randn(rows, DEPTH, dtype=torch.bfloat16, device=_DEVICE)
        for how in ("sampled", "greedy"):
            arguments = _sampling(rows, is_greedy=how == "greedy")
            yield Case(
                kernel="lm head + sampling",
                workload=f"{requests} requests x {ROWS_PER_REQUEST} rows, {how}",
                runs=[partial(lm_head_argmax, hidden, head, *arguments, precision=SERVED_BF16)],
                bytes=2 * VOCAB * DEPTH + 2 * rows * DEPTH + 8 * rows,
                flops=2 * rows * VOCAB * DEPTH,
                target=0.7,
                peers={"torch linear + argmax": partial(_library, hidden, weight)},
            )
        del hidden
    yield from _markov()
    yield from _logits()


def _markov() -> Iterator[Case]:
    embed, weight = _normal(VOCAB, RANK), _normal(VOCAB, RANK)
    head = LinearWeight.from_bf16(weight, keep_bytes=True)
    confidence = LinearWeight.from_bf16(_normal(1, DEPTH + RANK), keep_bytes=True)
    for count in REQUESTS:
        base = torch.randn(count, DRAFTS, VOCAB, device=_DEVICE)
        hidden = torch.randn(count, DRAFTS, DEPTH, dtype=torch.bfloat16, device=_DEVICE)
        previous = torch.randint(0, VOCAB, (count,), device=_DEVICE)
        arguments = (base, hidden, previous, embed, head, confidence, *_sampling(count, is_greedy=False))
        yield Case(
            kernel="markov loop",
            workload=f"{count} requests, {DRAFTS} draft positions",
            runs=[partial(markov_loop, *arguments, width=DRAFTS, precision=SERVED_BF16)],
            # The head stays in the cache between two positions only in part, so it is counted at every one.
            bytes=DRAFTS * (4 * count * VOCAB + 2 * VOCAB * RANK + 2 * count * (DEPTH + RANK)),
            flops=2 * DRAFTS * count * VOCAB * RANK,
        )


def _logits() -> Iterator[Case]:
    rows = max(REQUESTS) * ROWS_PER_REQUEST
    # A few likely tokens over a flat rest, as a trained model has them.
    logits = torch.randn(rows, VOCAB, device=_DEVICE) * 2.0
    logits[:, :64] += 12.0
    _, seeds, positions, greedy = _sampling(rows, is_greedy=False)
    yield Case(
        kernel="sampling from logits",
        workload=f"{rows} rows",
        runs=[partial(coupled_argmax, logits, seeds, positions, greedy)],
        bytes=4 * rows * VOCAB,
    )
    # Its parameters come from the host, so it must be too long to be captured into a graph.
    yield Case(
        kernel="temperature and top-p",
        workload=f"{rows} rows",
        runs=[partial(process_logits, logits, [RowSampling(temperature=0.6, top_p=0.95)] * rows)],
        bytes=2 * 4 * rows * VOCAB,
    )


def _sampling(rows: int, *, is_greedy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1/T, seeds, output indices and is_greedy of rows."""
    return (
        torch.ones(rows, device=_DEVICE),
        torch.randint(-(2**62), 2**62, (rows,), device=_DEVICE),
        torch.arange(rows, device=_DEVICE),
        torch.full((rows,), is_greedy, device=_DEVICE),
    )


def _normal(rows: int, columns: int) -> Tensor:
    """bfloat16 [rows, columns], drawn in parts so that no float32 copy of a head is held."""
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=_DEVICE)
    for part in weight.split(8192):
        part.normal_(std=columns**-0.5)
    return weight


def _library(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, weight).argmax(1)
