"""Nano on real text by domain: prompts, rounds of full width for its calibration, and what they show.

PYTHONPATH=tests python -m bench.dspark_nano ROUNDS [--seed N]      log rounds to fit from
shoal model calibrate ROUNDS --out kernels/shoal_nano/release/calibration.json
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.nano_scores import held_out_files
from shoal_engine import LLM, SamplingParams
from shoal_engine.llm import model_directory
from shoal_engine.verify.calibration import Mode
from shoal_engine.verify.rounds import Rounds, read_rounds
from shoal_engine.verify.setup import VerifySettings
from shoal_nano.packing import DialogueEncoder
from shoal_nano.prompt import render
from shoal_nano.tasks import CHECKED_FAMILIES, make_item
from shoal_nano.tokenizer import BOS
from shoal_nano.tools_text import tools_texts

FIT_SEED, MEASURE_SEED = 7001, 9002
ITEMS, FIT_TEXTS, MEASURE_TEXTS = 40, 480, 400
PROMPT_TOKENS, TEXT_TOKENS, ANSWER_SLACK = 64, 32, 8
TEXT = "text"
STREAMS = 16
SHORT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue, by at most so many tokens."""

    ids: list[int]
    room: int


def prompts(llm: LLM, seed: int, texts: int) -> dict[str, list[Prompt]]:
    """By domain: held-out items of every task family, and held-out files of Python's library where they are there."""
    rng = random.Random(seed)
    encoder, tools = DialogueEncoder(llm.get_tokenizer()), tools_texts()
    found: dict[str, list[Prompt]] = {}
    for family in CHECKED_FAMILIES:
        items = [make_item(family, rng, held_out=True) for _ in range(ITEMS)]
        documents = [encoder.encode(render(item.dialogue, tools), family, 1.0) for item in items]
        found[family] = [
            Prompt(list(d.ids[: d.prompt_length]), len(d.ids) - d.prompt_length + ANSWER_SLACK) for d in documents
        ]
    # Files that a calibration was fitted on are not those that it is measured on.
    files = held_out_files()[seed % 2 :: 2]
    if files:
        found[TEXT] = [Prompt(_cut(llm, rng.choice(files).text, rng), TEXT_TOKENS) for _ in range(texts)]
    return found


def _cut(llm: LLM, text: str, rng: random.Random) -> list[int]:
    tokenizer = llm.get_tokenizer()
    bos = tokenizer.token_to_id(BOS)
    assert bos is not None
    ids = tokenizer.encode(text[:20_000], add_special_tokens=False).ids
    start = rng.randrange(max(1, len(ids) - PROMPT_TOKENS))
    return [bos, *ids[start : start + PROMPT_TOKENS - 1]]


def short_prompts(llm: LLM, seed: int, count: int, room: int) -> list[Prompt]:
    """The shortest prompts of tasks and as short cuts of text, in turn: their time is that of their answers."""
    by_domain = prompts(llm, seed, count)
    texts = [Prompt(one.ids[:SHORT_TOKENS], room) for one in by_domain.pop(TEXT, [])]
    tasks = sorted((one for some in by_domain.values() for one in some), key=lambda one: len(one.ids))
    return [one for pair in zip(tasks[:count], texts or tasks[count:], strict=False) for one in pair][:count]


def log_rounds(path: Path, seed: int, texts: int, domains: Sequence[str] | None = None) -> None:
    """Run all prompts (or those of some domains) greedily and sampled, every draft verified, and log the rounds."""
    with LLM("nano", max_num_seqs=STREAMS, verify=VerifySettings(width=5, round_log=path)) as llm:
        by_domain = prompts(llm, seed, texts)
        chosen = [prompt for domain in domains or by_domain for prompt in by_domain[domain]]
        for kinds in (((0.0, 1.0),), ((1.0, 1.0), (0.7, 0.9))):
            params = [
                SamplingParams(temperature=kind[0], top_p=kind[1], max_tokens=p.room, seed=number)
                for number, (p, kind) in enumerate(zip(chosen, itertools.cycle(kinds), strict=False))
            ]
            llm.generate([p.ids for p in chosen], params, decode_sequence=False)


def rounds_by_domain(seed: int, texts: int) -> dict[str, Mapping[Mode, Rounds]]:
    """Fresh rounds of every domain."""
    found: dict[str, Mapping[Mode, Rounds]] = {}
    domains = [*CHECKED_FAMILIES, *([TEXT] if held_out_files() else [])]
    with tempfile.TemporaryDirectory() as folder:
        for domain in domains:
            path = Path(folder) / f"{domain}.jsonl"
            log_rounds(path, seed, texts, [domain])
            found[domain] = read_rounds(path).modes
    return found


def accepted_by_position(rounds: Rounds) -> list[float]:
    """The share of rounds in which each draft position, and all before it, was accepted."""
    width = rounds.logits.shape[1]
    return [round(float(np.mean(rounds.accepted > j)), 4) for j in range(width)]


def joined(parts: Sequence[Rounds]) -> Rounds:
    """The rounds of several domains."""
    return Rounds(
        np.concatenate([one.logits for one in parts]),
        np.concatenate([one.margins for one in parts]),
        np.concatenate([one.accepted for one in parts]),
    )


def release_directory() -> Path:
    """Where nano's weights lie, and its calibration."""
    return model_directory("nano")


def main() -> int:
    """Log rounds to fit a calibration from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path, metavar="ROUNDS")
    parser.add_argument("--seed", type=int, default=FIT_SEED)
    args = parser.parse_args()
    log_rounds(args.rounds, args.seed, FIT_TEXTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
