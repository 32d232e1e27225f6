"""Every size of step once, before a worker serves: on an accelerator a new number of rows may need a new kernel.

Kernels are compiled for classes of row counts: one row, multiples of 16, the tile that a count asks for. A class that
nobody has met on a machine costs its first request seconds to minutes. What is compiled is kept on disk, so that later
starts only load it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from shoal_engine.block_pool import BLOCK_TOKENS, blocks_for
from shoal_engine.empty_steps import context_of, run_draft, run_rows
from shoal_engine.model_port import StepModel
from shoal_engine.requests import SamplingSpec

logger = logging.getLogger(__name__)

_ALL_UP_TO = 8
_REPORT_S = 5.0
_EVEN_TABLE = 16  # blocks: tables as wide as a multiple of this have kernels of their own
# Greedy and free rows are chosen without logits; the others go through edits, filters and log-probabilities.
_PLAIN = (SamplingSpec(temperature=0.0), SamplingSpec())
_OTHERS = (
    SamplingSpec(top_p=0.9, top_k=40, min_p=0.01, top_logprobs=1),
    SamplingSpec(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={0: 1.0}),
)


def row_counts(most: int) -> list[int]:
    """Numbers of rows in 1 .. most that between them need every kernel that any number up to `most` needs.

    Around powers of two, 5/4 and 3/2 of them, where tiles change, and multiples of 16, of 4 and of neither among them:
    the parts of an array of so many numbers begin at 16 bytes, or do not.
    """
    counts = {*range(1, _ALL_UP_TO + 1), most, most - 1}
    power = _ALL_UP_TO
    while power <= most:
        near = (0, 1, 4, 16, power // 4, power // 4 + 1, power // 2, power // 2 + 1)
        counts |= {power + distance for distance in near}
        power *= 2
    return sorted(count for count in counts if 0 < count <= most)


def compile_ahead(
    model: StepModel[Tensor],
    *,
    step_rows: int,
    verify_width: int,
    is_prefill_only: bool,
    limit_s: float,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Run steps, samplings and drafts of every class on empty slots, most frequent sizes first; False if cut short.

    step_rows      rows of one step at most; verify_width: drafts verified per choice, 0 makes none
    limit_s        no further size is begun after it: the rest is compiled while requests run
    raises         what the model raises

    Slots are cleared afterwards; blocks keep rows that no request has a claim on.
    """
    begin = told = now()
    work = list(_work(model, step_rows, verify_width, is_prefill_only))
    for done, (what, count, run) in enumerate(work):
        if now() - begin > limit_s:
            logger.warning(
                "kernels are compiled while serving", extra={"missing": len(work) - done, "limit_s": limit_s}
            )
            return False
        run()
        if now() - told >= _REPORT_S:
            told = now()
            progress = {"done": done + 1, "of": len(work), "last": f"{what} {count}", "seconds": round(told - begin, 1)}
            logger.info("compiling kernels", extra=progress)
    logger.info("kernels are there", extra={"sizes": len(work), "seconds": round(now() - begin, 1)})
    return True


def _work(
    model: StepModel[Tensor], step_rows: int, verify_width: int, is_prefill_only: bool
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """What, how many, and the call: all sizes of steps, then samplings of a step's rows, then drafts."""
    shape = model.shape
    most = min(step_rows, shape.block_count * BLOCK_TOKENS, shape.max_context)
    first = {min(verify_width + 1, most), most}  # a request alone, a chunk of a long prompt
    for count in (*sorted(first), *(n for n in row_counts(most) if n not in first)):
        yield "rows", count, partial(run_rows, model, count)
    tables = min(shape.block_count, blocks_for(shape.max_context))
    for count in _block_counts(tables):
        yield "blocks", count, partial(run_rows, model, 2, table=count)
    for count in row_counts(most):
        wide = -(-blocks_for(count) // _EVEN_TABLE) * _EVEN_TABLE
        for table in (wide, wide + 1):
            if table <= tables:
                yield f"rows, {table} blocks,", count, partial(run_rows, model, count, table=table)
    if is_prefill_only:
        return
    for count in row_counts(min(most, shape.slot_count * (verify_width + 1))):
        yield "samples", count, partial(_sample, model, count)
    if verify_width:
        for count in row_counts(shape.slot_count):
            yield "drafts", count, partial(_draft, model, count, verify_width)


def _block_counts(most: int) -> list[int]:
    """Lengths of contexts: what selects among their entries is made for powers of two."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted(count for count in {*powers, *(power + 1 for power in powers)} if count <= most)


def _sample(model: StepModel[Tensor], rows: int) -> None:
    hidden = run_rows(model, rows)
    for specs in (_PLAIN, _OTHERS):
        model.sample(hidden, range(rows), [context_of(specs[row % len(specs)]) for row in range(rows)])


def _draft(model: StepModel[Tensor], choices: int, width: int) -> None:
    for specs in (_PLAIN, _OTHERS):
        run_draft(model, [specs[slot % len(specs)] for slot in range(choices)], width)
