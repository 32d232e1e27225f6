"""Nano generating greedily on a device as on the host: how often, and whether the device agrees with itself."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from shoal_engine import LLM, SamplingParams
from shoal_engine.llm import model_directory
from shoal_model.model import Model
from shoal_model.sequence import SequenceRun, blocks_for
from support.on_device import DEVICE, needs_device

pytestmark = [pytest.mark.gpu, needs_device]
PROMPTS = [
    "def add(a, b):",
    "class Stack:\n    def __init__(self):",
    "import os\n\ndef read(path):",
    "for i in range(10):",
    "The list type has the following methods:",
    "Sort these numbers: 42 7 19 3\n",
    "def fibonacci(n):\n    ",
    "try:\n    value = int(text)\nexcept",
]
COUNT = 48
LEAST_AGREEMENT = 0.9


@cache
def tokens(device: str, verify_width: int = 5, together: int = 8) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with LLM("nano", device=device, verify_width=verify_width, max_num_seqs=together) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, decode_sequence=False)]


def test_nano_chooses_on_a_device_what_it_chooses_on_the_host() -> None:
    """Free-running answers part for good at one near tie, so every choice is also asked behind the host's tokens."""
    host, there = tokens("cpu"), tokens(DEVICE)
    run_length = sum(common(one, other) for one, other in zip(host, there, strict=True))
    right = sum(forced(prompt, answer) for prompt, answer in zip(PROMPTS, host, strict=True))
    total = COUNT * len(PROMPTS)
    print(f"\nsame choice behind the same tokens {right / total:.4f}, free-running {run_length / total:.4f} of {total}")
    assert right / total >= LEAST_AGREEMENT


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def forced(prompt: str, answer: tuple[int, ...]) -> int:
    """How many tokens of an answer the device would have chosen behind the ones before it."""
    with LLM("nano", max_num_seqs=1) as llm:
        ids = [0, *llm.get_tokenizer().encode(prompt, add_special_tokens=False).ids]
    sequence = [*ids, *answer]
    model = device_nano()
    run = SequenceRun(model, slot=0, block_table=range(1, 1 + blocks_for(len(sequence))))
    hidden = run.run(sequence[:-1], range(len(ids) - 1, len(sequence) - 1))
    return int((model.logits(hidden).argmax(1).cpu() == torch.tensor(answer)).sum())


def device_nano() -> Model:
    return Model.load(model_directory("nano"), device=DEVICE, num_blocks=4, num_slots=1)


@pytest.mark.parametrize(("verify_width", "together"), [(0, 1), (0, 8), (3, 2), (5, 1)])
def test_drafts_and_company_change_no_token_of_nano(verify_width: int, together: int) -> None:
    assert tokens(DEVICE, verify_width, together) == tokens(DEVICE)
