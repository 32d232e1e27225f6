"""Nano's answers to held-out task items, by the engine that serves it: right answers and accept lengths."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Bar, finish
from shoal_engine import LLM, SamplingParams
from shoal_engine.llm import RequestOutput
from shoal_nano.packing import DialogueEncoder, Document
from shoal_nano.prompt import render
from shoal_nano.tasks import CHECKED_FAMILIES, Item, check, held_out_items
from shoal_nano.text import TextFile, read_text
from shoal_nano.tokenizer import BOS, END_THINK, EOS
from shoal_nano.tools_text import tools_texts

ITEMS, SEED, ANSWER_SLACK = 40, 1, 8
TEXT_PROMPTS, TEXT_PROMPT_TOKENS, TEXT_TOKENS = 16, 128, 64
WANT = {"copy": 0.95, "sort": 0.95, "json": 0.95, "tool": 0.95, "arithmetic": 0.9, "reason": 0.9, "recall": 0.8}


@dataclass(frozen=True, slots=True)
class Score:
    """Share of right answers, and accepted drafts per decode step."""

    right: float
    accepted: int
    steps: int


def score(llm: LLM, encoder: DialogueEncoder, family: str, temperature: float) -> Score:
    """One family at one temperature."""
    items, texts = held_out_items(family, ITEMS, SEED), tools_texts()
    documents = [encoder.encode(render(item.dialogue, texts), family, 1.0) for item in items]
    prompts = [one.ids[: one.prompt_length] for one in documents]
    params = [
        SamplingParams(temperature=temperature, max_tokens=_room(one), seed=number)
        for number, one in enumerate(documents)
    ]
    outputs = llm.generate(prompts, params, decode_sequence=False)
    right = sum(check(item, _answer(llm, item, output)) for item, output in zip(items, outputs, strict=True))
    return Score(right / len(items), *_accepted(outputs))


def text_acceptance(llm: LLM, files: Sequence[TextFile], temperature: float) -> Score:
    """Accept length while continuing held-out text."""
    rng = random.Random(SEED)
    tokenizer = llm.get_tokenizer()
    bos = tokenizer.token_to_id(BOS)
    assert bos is not None
    prompts: list[list[int]] = []
    for _ in range(TEXT_PROMPTS):
        ids = tokenizer.encode(rng.choice(files).text[:20_000], add_special_tokens=False).ids
        start = rng.randrange(max(1, len(ids) - TEXT_PROMPT_TOKENS))
        prompts.append([bos, *ids[start : start + TEXT_PROMPT_TOKENS - 1]])
    params = [SamplingParams(temperature=temperature, max_tokens=TEXT_TOKENS, seed=n) for n in range(TEXT_PROMPTS)]
    return Score(0.0, *_accepted(llm.generate(prompts, params, decode_sequence=False)))


def _room(document: Document) -> int:
    return len(document.ids) - document.prompt_length + ANSWER_SLACK


def _answer(llm: LLM, item: Item, output: RequestOutput) -> str:
    tokenizer = llm.get_tokenizer()
    ids = list(output.outputs[0].token_ids)
    if ids and ids[-1] == tokenizer.token_to_id(EOS):
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text.split(END_THINK, 1)[-1] if item.dialogue.is_thinking else text


def _accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    return sum(one.usage.accepted_draft_tokens for one in outputs), sum(one.usage.decode_steps for one in outputs)


def held_out_files() -> list[TextFile]:
    """Files of this Python's own library that nano was not trained on, if it is the version that nano read."""
    root = Path(sysconfig.get_path("stdlib"))
    return [one for one in read_text(root, root) if one.is_held_out] if sys.version_info[:2] == (3, 11) else []


def main() -> int:
    """Score every family greedily and at temperature 1."""
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    files = held_out_files()
    with LLM("nano") as llm:
        encoder = DialogueEncoder(llm.get_tokenizer())
        for temperature in (0.0, 1.0):
            scores = {family: score(llm, encoder, family, temperature) for family in CHECKED_FAMILIES}
            mean = sum(one.accepted for one in scores.values()) / sum(one.steps for one in scores.values())
            text = text_acceptance(llm, files, temperature) if files else None
            figures[f"temperature {temperature:g}"] = {
                "right": {family: one.right for family, one in scores.items()},
                "accept_length": {family: one.accepted / one.steps for family, one in scores.items()},
                "accept_length_tasks": mean,
                "accept_length_text": text.accepted / text.steps if text else None,
            }
            if temperature:
                continue
            for family, one in scores.items():
                bars.append(Bar(name=family, value=one.right, want=WANT[family], sense="at least", unit="right"))
            bars.append(Bar(name="accept_length_tasks", value=mean, want=2.5, sense="at least", unit="of 5"))
            if text:
                value = text.accepted / text.steps
                bars.append(Bar(name="accept_length_text", value=value, want=0.8, sense="at least", unit="of 5"))
    workload = {"items": ITEMS, "seed": SEED, "text_prompts": TEXT_PROMPTS, "text_tokens": TEXT_TOKENS}
    return finish("nano_scores", workload=workload, bars=bars, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
