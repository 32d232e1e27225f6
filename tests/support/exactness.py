"""What the exactness tests share: the cases, what each says alone, and a drafter that is right up to a random place."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from shoal_engine.logical_rows import PrefixRows
from shoal_engine.model_port import Draft, DraftStart
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart, GenerationRequest
from shoal_engine.served_model import ServedModel
from shoal_kernels.ops.linear import LinearWeight
from shoal_model.model import Model
from shoal_model.sampler import choice_seed
from support.engine_driver import Driver, RandomWidths, request
from support.tiny_model import REPLAY, text, tiny_model, tiny_weights

BLOCKS, SLOTS = 160, 72
OUTPUT = 16


@dataclass(frozen=True)
class Case:
    """One prompt with its seed and temperature."""

    length: int
    seed: int
    temperature: float
    output: int = OUTPUT

    @property
    def name(self) -> str:
        return f"{self.length}-{self.seed}-{self.temperature}"

    @property
    def prompt(self) -> list[int]:
        return text(self.length, self.seed)

    def request(self, **more: Any) -> GenerationRequest:
        """The request of this case; keywords replace its own."""
        values: dict[str, Any] = {
            "name": self.name,
            "seed": self.seed,
            "temperature": self.temperature,
            "max_tokens": self.output,
        }
        return request(self.prompt, **(values | {"ignore_eos": True} | more))


# Both sides of every boundary: ratio 2 (odd and even), top-k of 8 entries at ratio 1 (8 tokens) and at ratio 2 (16),
# window 16, replay length 24, blocks of 128, and the first prompts that may use a hit of one and of two blocks.
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 127, 128, 129, 151, 152, 153, 279, 280, 281)
CASES = tuple(Case(length, 100 + i, float(i % 2)) for i, length in enumerate(LENGTHS)) + tuple(
    Case(length, 200 + i, float(1 - i % 2)) for i, length in enumerate((9, 17, 24, 129, 153, 281))
)
HIT_CASES = tuple(case for case in CASES if case.length >= 128 + REPLAY)


class GuidedModel(ServedModel):
    """Drafts what the answer is known to be, right up to a random place."""

    def __init__(self, model: Model, answers: Mapping[tuple[int, int], Sequence[int]], salt: int = 0) -> None:
        super().__init__(model)
        self._answers = answers
        self._random, self._chances = random.Random(salt), random.Random(f"chances {salt}")

    def draft(self, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        super().draft(starts, width)
        return [self._guess(start, width) for start in starts]

    def _guess(self, start: DraftStart, width: int) -> Draft:
        context = start.context
        answer = self._answers[len(context.prompt), context.seed]
        known = list(answer[context.output_index : context.output_index + width])
        drafts = known + [5] * (width - len(known))
        for j in range(self._random.randint(0, width), width):
            drafts[j] = (drafts[j] + 1) % self.shape.vocab_size
        chances = tuple(self._chances.uniform(-3.0, 5.0) for _ in drafts)
        return Draft(tuple(drafts), chances)


@cache
def alone(case: Case) -> tuple[int, ...]:
    """What a case says by itself: whole prompt in one chunk, no drafts, nothing cached."""
    return alone_seed(case, case.seed)


@cache
def alone_choice(case: Case, choice: int) -> tuple[int, ...]:
    """What choice `choice` of a case says by itself."""
    return alone_seed(case, choice_seed(case.seed, choice))


@cache
def alone_seed(case: Case, seed: int) -> tuple[int, ...]:
    """What a case says by itself under another seed."""
    model = ServedModel(tiny_model(num_blocks=8, num_slots=1))
    d = Driver(model, replay_length=REPLAY, planner=FixedWidth(0), chunk=512)
    (tokens,) = d.generate(case.request(seed=seed))
    d.assert_at_baseline()
    return tuple(tokens)


def guided(cases: Iterable[Case], salt: int = 0) -> ServedModel:
    """A model with room for all cases whose drafts are often right."""
    return GuidedModel(
        tiny_model(num_blocks=BLOCKS, num_slots=SLOTS), {(c.length, c.seed): alone(c) for c in cases}, salt
    )


def noisy_drafts(*, num_blocks: int = BLOCKS, num_slots: int = SLOTS) -> ServedModel:
    """The tiny model with noise for its draft's Markov head."""
    weights, like = tiny_weights(), tiny_model()
    assert weights.draft is not None
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(weights.draft.markov_embed.shape[0], weights.draft.markov_embed.shape[1], generator=generator)
    head = LinearWeight.from_bf16(noise.to(torch.bfloat16).to(like.device), keep_bytes=like.precision.keeps_bytes)
    weights = replace(weights, draft=replace(weights.draft, markov_head=head))
    return ServedModel(
        Model(
            like.config,
            weights,
            precision=like.precision,
            device=like.device,
            num_blocks=num_blocks,
            num_slots=num_slots,
        )
    )


def driver(cases: Iterable[Case], *, salt: int = 0, model: ServedModel | None = None, **more: Any) -> Driver:
    """A driver over a guided model with random widths, unless told otherwise."""
    values: dict[str, Any] = {"replay_length": REPLAY, "planner": RandomWidths(salt), "chunk": 128}
    return Driver(model or guided(cases, salt), **(values | more))


def assert_same(d: Driver, cases: Iterable[Case]) -> None:
    """Every case has said what it says alone, and nothing is held any more."""
    assert not d.sink.failed
    different = [case.name for case in cases if tuple(d.sink.tokens[case.name, 0]) != alone(case)]
    assert not different
    assert all(case.name in d.sink.ended for case in cases)
    d.assert_at_baseline()


def interrupted(case: Case, cut: int) -> GenerationRequest:
    """A case that goes on after `cut` tokens so far."""
    return case.request(choices=[ChoiceStart(output_ids=alone(case)[:cut])])


@cache
def stored_prefix(case: Case) -> PrefixRows:
    """The longest usable prefix of a case, with its snapshot, as another engine stored it."""
    d = Driver(ServedModel(tiny_model(num_blocks=8, num_slots=1)), replay_length=REPLAY, chunk=100)
    d.generate(case.request(max_tokens=1, export_chain=True))
    hit = (case.length - REPLAY) // 128 * 128
    blocks = [d.sink.blocks[case.name, None, i] for i in range(hit // 128)]
    return PrefixRows(hit_tokens=hit, blocks=blocks, encoder_window=d.sink.snapshots[case.name, None, hit])
