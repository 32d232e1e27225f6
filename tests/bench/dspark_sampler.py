"""The sampler on the host at a vocabulary of 129,280: rows plain, edited and filtered, and a mask against plain numpy.

Where masks are dense (nearly everything may come) and where they are sparse (a few tokens may).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from bench.harness import Bar, finish
from shoal_engine.model_port import TokenContext
from shoal_engine.requests import SamplingSpec
from shoal_engine.sample_rows import sample_row
from shoal_engine.token_history import TokenHistory
from shoal_kernels.ops.sampling import RowSampling, edit_logits
from shoal_model.sampler import SampleRow, sample

VOCAB, ROWS, OUTPUT, PROMPT = 129_280, 60, 2_000, 4_000

SPECS = {
    "temperature": SamplingSpec(),
    "penalties and bias": SamplingSpec(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={5: 1.0, 9: -100.0}
    ),
    "bad words": SamplingSpec(bad_words=((7,), (8, 9, 10))),
    "top-p 0.95 and top-k 50": SamplingSpec(top_p=0.95, top_k=50),
    "5 log-probabilities": SamplingSpec(top_logprobs=5),
}


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Medians in microseconds; a row's share where there are many rows."""
    results = [{"case": name, "us": round(_median_us(call, rounds) / share, 1)} for name, call, share in _cases()]
    for result in results:
        print(result, file=sys.stderr)
    return results


def _cases() -> Iterator[tuple[str, Callable[[], object], int]]:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)).astype(np.float32)) * 3
    prompt, output = rng.integers(0, VOCAB, PROMPT), rng.integers(0, VOCAB, OUTPUT).tolist()
    history = TokenHistory(prompt)
    for name, spec in SPECS.items():
        contexts = [
            TokenContext(
                spec=spec,
                seed=row,
                output_index=OUTPUT,
                prompt=prompt,
                output=output,
                assumed=(5, 6, 7)[: row % 4],
                history=history,
                banned=frozenset({7}) if spec.bad_words else frozenset(),
            )
            for row in range(ROWS)
        ]
        yield f"rows: {name}", partial(_rows, contexts), ROWS
        yield f"sample: {name}", partial(sample, logits, _rows(contexts)), ROWS
    counted = np.array(output)
    yield "counting the output anew", lambda: np.bincount(counted, minlength=VOCAB).astype(np.int32), 1
    yield from _masks(rng)


def _rows(contexts: list[TokenContext]) -> list[SampleRow]:
    return [row for context in contexts if (row := sample_row(context, VOCAB)) is not None]


def _masks(rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], object], int]]:
    row = rng.normal(size=(1, VOCAB)).astype(np.float32)
    for kind, share in (("dense", 0.98), ("half", 0.5), ("sparse", 0.0005)):
        allowed = rng.random(VOCAB) < share
        words = np.packbits(allowed, bitorder="little").view(np.int32)
        z, target = torch.from_numpy(row.copy()), row.copy()
        setting = [RowSampling(allowed=torch.from_numpy(words))]
        forbidden = ~allowed
        ways: dict[str, Callable[[], object]] = {
            "packed": partial(edit_logits, z, setting, in_place=True),
            "numpy, target[forbidden] = -inf": partial(target.__setitem__, (0, forbidden), -np.inf),
            "numpy, where": partial(np.where, allowed, target, -np.inf),
            "numpy, from bits": partial(_from_bits, words, target),
        }
        for way, call in ways.items():
            yield f"mask, {kind}: {way}", call, 1


def _from_bits(words: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.where(np.unpackbits(words.view(np.uint8), bitorder="little").view(bool), target, -np.inf)


def _median_us(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return median(times) * 1e6


def main() -> int:
    """Bars: a mask applied in at most half of the best plain numpy way."""
    torch.set_num_threads(1)
    figures = {result["case"]: result["us"] for result in run()}
    bars = []
    for kind in ("dense", "half", "sparse"):
        ways = [value for case, value in figures.items() if case.startswith(f"mask, {kind}: numpy")]
        share = figures[f"mask, {kind}: packed"] / min(ways)
        bars.append(Bar(name=f"mask, {kind}: of numpy", value=round(share, 3), want=0.5, sense="at most", unit="x"))
    return finish("dspark_sampler", workload={"vocabulary": VOCAB, "rows": ROWS}, bars=bars, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
