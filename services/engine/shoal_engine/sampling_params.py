"""Sampling parameters of the offline LLM, named as DeepInfer's users know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from shoal_common.constraints import OutputConstraint
from shoal_common.errors import InvalidArgument

from shoal_engine.requests import MAX_SEED, SamplingSpec

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    n                  choices per prompt, 1 .. 128
    temperature        below 1e-5 the most probable token is taken
    top_k              0 or less keeps all
    seed               same model, prompt, parameters and seed give the same tokens; None draws one
    max_tokens         output tokens of one choice, at least 1
    min_tokens         no end-of-sequence or stop token before this many
    stop_token_ids     tokens that end a choice; the one that did is its last token
    top_logprobs       log-probabilities of the emitted token and of this many of the best, 0 .. 20; None: none. Of what
                       is sampled from, filters included: a token that they or a mask removed has -9999.0. At a
                       temperature below 1e-5 those at temperature 1
    bad_words          token sequences that the output never contains: at most 128 of 1 to 32 ids
    forced_ids         what the output begins with, whatever the model says
    prompt_logprobs    like top_logprobs, of every prompt token after the first, under the model itself; the prompt must
                       not be longer than the engine's replay
    constraint         what every output must be: `shoal_common.constraints.normalise(ConstraintKind.REGEX, "a+")`
    raises             InvalidArgument (a MeshError) naming the field
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int | None = None
    bad_words: Sequence[Sequence[int]] = ()
    forced_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    constraint: OutputConstraint | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.n, Integral) or not 1 <= self.n <= MAX_CHOICES:
            raise InvalidArgument.at("n", f"must be a whole number, at least 1 and at most {MAX_CHOICES}, got {self.n}")
        if self.seed is not None and not (isinstance(self.seed, Integral) and 0 <= self.seed <= MAX_SEED):
            raise InvalidArgument.at("seed", f"must be a whole number, at least 0 and below 2**64, got {self.seed}")
        self.spec()

    def spec(self) -> SamplingSpec:
        """What the engine knows of these parameters."""
        return SamplingSpec(
            temperature=self.temperature,
            top_k=max(self.top_k, 0) if isinstance(self.top_k, Integral) else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logit_bias=dict(self.logit_bias),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            top_logprobs=self.top_logprobs,
            bad_words=tuple(tuple(word) for word in self.bad_words),
            forced_ids=tuple(self.forced_ids),
            prompt_logprobs=self.prompt_logprobs,
        )
