"""Asks a mesh in tokens, and the offline model the same."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.inference.v1 import generation_pb2
from shoal_client import Client, SamplingParams, generation
from shoal_common.constraints import OutputConstraint
from shoal_common.constraints.wire import constraint_message
from shoal_engine import LLM
from shoal_engine import SamplingParams as OfflineParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt of tokens and how to continue it. EOS does not end it, so that every answer has `max_tokens`."""

    prompt: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 1
    max_tokens: int = 24
    n: int = 1
    user_id: str | None = None
    constraint: OutputConstraint | None = None

    def generation(self) -> generation_pb2.Generation:
        """As the mesh takes it."""
        sampling = SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True
        )
        constraint = None if self.constraint is None else constraint_message(self.constraint)
        return generation(list(self.prompt), sampling=sampling, n=self.n, user_id=self.user_id, constraint=constraint)


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens per choice, and how many prompt tokens came from the cache."""

    tokens: tuple[tuple[int, ...], ...]
    cached: int


def ask(client: Client, question: Question) -> Told:
    """The mesh's answer."""
    answer = client.generate(question.generation())
    choices = sorted(answer.choices, key=lambda choice: choice.output.choice_index)
    return Told(tuple(tuple(choice.output.tokens.ids) for choice in choices), answer.tail.usage.cached_prompt_tokens)


def ask_offline(llm: LLM, questions: list[Question]) -> list[tuple[tuple[int, ...], ...]]:
    """Tokens per choice of each question, from the model in this process."""
    params = [
        OfflineParams(
            temperature=one.temperature,
            seed=one.seed,
            max_tokens=one.max_tokens,
            n=one.n,
            ignore_eos=True,
            constraint=one.constraint,
        )
        for one in questions
    ]
    prompts = [list(one.prompt) for one in questions]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, decode_sequence=False)
    return [tuple(choice.token_ids for choice in output.outputs) for output in outputs]
