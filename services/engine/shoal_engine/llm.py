"""Generation without any service: `LLM.generate` for evaluations and rollouts."""

from __future__ import annotations

import itertools
import secrets
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
from shoal_common.constraints import OutputConstraint
from shoal_common.errors import InvalidArgument, OutOfCapacity, Unavailable
from shoal_kernels.threads import set_num_threads
from shoal_model.config import ModelConfig
from shoal_model.device import DeviceUnavailable, open_device
from shoal_model.synthetic import Synthetic
from tokenizers import Tokenizer

from shoal_engine.batcher import StepBudget
from shoal_engine.block_pool import blocks_for
from shoal_engine.collector import Collector, Gathered
from shoal_engine.constraint import Constraint
from shoal_engine.core import EngineConfig
from shoal_engine.engine import Engine
from shoal_engine.events import EngineUsage, PositionLogprobs
from shoal_engine.model_identity import drafter, identify
from shoal_engine.planner import FixedWidth, WidthPlanner
from shoal_engine.replay import default_replay_length
from shoal_engine.requests import ChoiceStart, GenerationRequest, TokenIds
from shoal_engine.sampling_params import SamplingParams
from shoal_engine.served_model import ServedModel
from shoal_engine.verify.setup import Drafter, VerifySettings, open_planner

if TYPE_CHECKING:
    from shoal_engine.constraints import ConstraintCompiler

DEFAULT_MODEL_LEN = 8192
"""Positions of prompt + output when nothing else is asked for and the model allows more."""
MAX_VERIFY_WIDTH = 5
"""Drafts that a round of a released model makes."""

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOutput:
    """One continuation. `finish_reason` is "stop" or "length"; log-probabilities only when asked for."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All continuations of one prompt, the seed in force and what it used.

    prompt_logprobs   when asked for, one per prompt token after the first
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[ChoiceOutput, ...]
    seed: int
    usage: EngineUsage
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class LLM:
    """A model in this process; `close` or a `with` statement frees it early. One `generate` at a time.

    model            a checkpoint folder, or "nano" for the one that comes with Shoal
    max_model_len    positions of prompt + output; None: the model's, at most 8192
    max_num_seqs     choices that run side by side
    max_num_batched_tokens    rows of one step
    verify_width     drafts verified per step, 0 .. 5; changes the speed, never the tokens
    verify           how drafts are verified, instead of `verify_width`: planned, or logged for a calibration
    threads          threads of one step, in the whole process; None leaves it as it is. Never changes the tokens
    device           "cpu", "cuda" or "cuda:N". Another device is another model in the sense of exactness
    replay_length    K; None: the model's default. Another K is another model in the sense of exactness
    synthetic        random weights of released size instead of a checkpoint: takes and gives token ids, no text
    raises           CheckpointError; InvalidArgument, also for a device that is not there; NotEnoughMemory
    """

    def __init__(
        self,
        model: str | Path = "nano",
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        verify_width: int = 5,
        verify: VerifySettings | None = None,
        threads: int | None = None,
        device: str = "cpu",
        replay_length: int | None = None,
        synthetic: Synthetic | None = None,
    ) -> None:
        source = _Checkpoint.of(model) if synthetic is None else _Drawn.of(synthetic)
        config = source.config
        length = min(max_model_len or DEFAULT_MODEL_LEN, config.max_position_embeddings)
        _check_numbers(length, max_num_seqs, max_num_batched_tokens, verify_width, threads)
        _check_device(device)
        served = source.load(max_num_seqs * blocks_for(length), max_num_seqs, device)
        shape = served.shape
        if threads is not None:
            set_num_threads(threads)
        self._bos_id = config.bos_token_id
        self._vocab_size = shape.vocab_size
        self._tokenizer = source.tokenizer()
        self._eos_id = shape.eos_id
        self._compiler: ConstraintCompiler | None = None
        self._collector = Collector()
        self._ids = itertools.count()
        replay_length = replay_length or default_replay_length(shape.window, shape.backtrack)
        planner: WidthPlanner = FixedWidth(min(verify_width, shape.draft_size))
        if verify is not None:
            drafting = source.drafter(replay_length, served.device)
            planner = open_planner(served, drafting, verify, step_rows=max_num_batched_tokens)
        self._engine = Engine(
            served,
            EngineConfig(
                replay_length=replay_length,
                max_context=length,
                budget=StepBudget(rows=max_num_batched_tokens, chunk=max_num_batched_tokens),
            ),
            self._collector,
            planner,
        )
        self._engine.open()
        # A step thread that is still in torch when the interpreter ends takes the process down with it.
        self._finalizer = weakref.finalize(self, self._engine.close)

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        decode_sequence: Literal[True] = True,
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        *,
        decode_sequence: Literal[False],
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        decode_sequence: bool = True,
    ) -> list[str] | list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        prompts           a text, texts, or lists of token ids. A text is tokenised as it stands, after the
                          beginning-of-sequence token; token ids are taken as they are
        sampling_params   one for all prompts, or one each
        use_tqdm          show on stderr how many prompts are done
        decode_sequence   the text of every prompt (n must be 1); False: a RequestOutput of every prompt
        raises            InvalidArgument, PromptTooLong, TokenOutOfRange, ExceedsCapacity for a prompt that cannot run,
                          NothingAllowed for one that may say nothing more: then none of them is returned
        """
        token_ids = self._token_ids(prompts, prompt_token_ids)
        params = _per_prompt(sampling_params or SamplingParams(), len(token_ids))
        if decode_sequence and any(p.n != 1 for p in params):
            raise InvalidArgument.at("n", "must be 1 with decode_sequence; decode_sequence=False returns all choices")
        requests = [self._request(ids, p) for ids, p in zip(token_ids, params, strict=True)]
        outputs = self._run(requests, use_tqdm)
        return [output.outputs[0].text for output in outputs] if decode_sequence else outputs

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidArgument for a synthetic model, which has none."""
        if self._tokenizer is None:
            raise InvalidArgument.at("synthetic", "a synthetic model has no tokenizer: give token ids")
        return self._tokenizer

    def close(self) -> None:
        """Stop the engine's thread, as the end of the process also does. Nothing can be generated afterwards."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _token_ids(self, prompts: Prompts | None, given: Sequence[Sequence[int]] | None) -> list[Sequence[int]]:
        if (prompts is None) == (given is None):
            raise InvalidArgument.at("prompts", "either prompts or prompt_token_ids must be given")
        items: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else (prompts or given or [])
        return [self._encode(item) if isinstance(item, str) else item for item in items]

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument.at("prompts", f"not valid Unicode: {error.reason}") from error
        ids: list[int] = self.get_tokenizer().encode(text, add_special_tokens=False).ids
        return [self._bos_id, *ids]

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _request(self, token_ids: Sequence[int], params: SamplingParams) -> GenerationRequest:
        prompt = _id_array(token_ids)
        number = next(self._ids)
        return GenerationRequest(
            request_id=f"offline-{number}",
            prompt_ids=prompt,
            params=params.spec(),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            choices=(ChoiceStart(),) * params.n,
            arrival=float(number),
            recover_in_place=True,
            constraint=None if params.constraint is None else self._compiled(params.constraint),
        )

    def _compiled(self, constraint: OutputConstraint) -> Constraint:
        if self._compiler is None:
            # Imported when first needed: most offline use has no constraints, and the engine is an extra.
            try:
                from shoal_engine.constraints import ConstraintCompiler, GrammarTokenizer
            except ImportError as error:
                raise InvalidArgument.at("constraint", "needs llguidance: pip install shoal[decode_worker]") from error
            tokenizer = GrammarTokenizer(
                self.get_tokenizer().to_str(), vocab_size=self._vocab_size, eos_id=self._eos_id
            )
            self._compiler = ConstraintCompiler(tokenizer)
        return self._compiler.compile(constraint).result()

    def _run(self, requests: list[GenerationRequest], shows_progress: bool) -> list[RequestOutput]:
        waiting = deque(requests)
        running: dict[str, GenerationRequest] = {}
        done: dict[str, RequestOutput] = {}
        try:
            while waiting or running:
                while waiting and self._admitted(waiting[0], has_others=bool(running)):
                    request = waiting.popleft()
                    running[request.request_id] = request
                request_id, gathered = self._collector.take_done()
                done[request_id] = self._output(running.pop(request_id), gathered)
                if shows_progress:
                    print(f"\r{len(done)}/{len(requests)} prompts", end="", file=sys.stderr, flush=True)
        finally:
            self._let_go(running)
            if shows_progress:
                print(file=sys.stderr)
        return [done[request.request_id] for request in requests]

    def _let_go(self, request_ids: Iterable[str]) -> None:
        """After a prompt that failed: drop the others, and what they have said."""
        with suppress(Unavailable):
            for cancelled in [self._engine.cancel(request_id) for request_id in request_ids]:
                cancelled.result()
        self._collector.clear()

    def _admitted(self, request: GenerationRequest, *, has_others: bool) -> bool:
        """Admit and start a request. False: there is no room until another one ends."""
        self._collector.open(request.request_id, len(request.choices))
        try:
            self._engine.admit(request).result()
        except OutOfCapacity:
            if has_others:
                return False
            raise
        self._engine.start(request.request_id).result()
        return True

    def _output(self, request: GenerationRequest, gathered: Gathered) -> RequestOutput:
        if gathered.usage is None:
            raise gathered.error or RuntimeError("a request left without an end")
        return RequestOutput(
            prompt_token_ids=tuple(request.prompt_ids.tolist()),
            outputs=tuple(
                ChoiceOutput(
                    token_ids=tuple(tokens),
                    text=self._text(tokens),
                    finish_reason=end.finish_reason.value if end.finish_reason else "",
                    logprobs=tuple(logprobs),
                )
                for tokens, logprobs, end in zip(gathered.tokens, gathered.logprobs, gathered.ends, strict=True)
            ),
            seed=request.seed,
            usage=gathered.usage,
            prompt_logprobs=gathered.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A model read from a folder."""

    directory: Path
    config: ModelConfig

    @classmethod
    def of(cls, model: str | Path) -> _Checkpoint:
        directory = model_directory(model)
        return cls(directory, ModelConfig.load(directory))

    def load(self, block_count: int, slot_count: int, device: str) -> ServedModel:
        return ServedModel.load(self.directory, block_count=block_count, slot_count=slot_count, device=device)

    def drafter(self, replay_length: int, device: torch.device) -> Drafter:
        identity = identify(self.directory, name="", replay_length=replay_length, device=device)
        return drafter(self.directory, identity, device)

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A model of random weights."""

    synthetic: Synthetic
    config: ModelConfig

    @classmethod
    def of(cls, synthetic: Synthetic) -> _Drawn:
        try:
            return cls(synthetic, synthetic.config())
        except ValueError as error:
            raise InvalidArgument.at("synthetic", str(error)) from error

    def load(self, block_count: int, slot_count: int, device: str) -> ServedModel:
        return ServedModel.synthetic(self.synthetic, block_count=block_count, slot_count=slot_count, device=device)

    def drafter(self, replay_length: int, device: torch.device) -> Drafter:
        raise InvalidArgument.at("verify", "a synthetic model's drafts are random: nothing can be planned")

    def tokenizer(self) -> Tokenizer | None:
        return None


def _id_array(token_ids: Sequence[int]) -> TokenIds:
    """Token ids as int64. InvalidArgument for anything but whole numbers, which numpy would round or take as ids."""
    try:
        found = np.asarray(token_ids)
        if found.size and found.dtype.kind not in "iu":
            raise TypeError(f"{found.dtype} among them")
        return np.array(token_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument.at("prompt_token_ids", f"not a list of token ids: {error}") from error


def model_directory(model: str | Path) -> Path:
    """The folder of a model name or path. Raises InvalidArgument when there is none."""
    directory = Path(str(files("shoal_nano"))) / "release" if model == "nano" else Path(model)
    if not (directory / "config.json").is_file():
        raise InvalidArgument.at("model", f"{model!s}: no config.json in {directory}", reason="MODEL_NOT_FOUND")
    return directory


def _check_numbers(length: int, num_seqs: int, batched: int, verify_width: int, threads: int | None) -> None:
    positive = {"max_model_len": length, "max_num_seqs": num_seqs, "max_num_batched_tokens": batched}
    for name, value in positive.items():
        if value < 1:
            raise InvalidArgument.at(name, f"must be positive, got {value}")
    if not 0 <= verify_width <= MAX_VERIFY_WIDTH:
        raise InvalidArgument.at("verify_width", f"must be in [0, {MAX_VERIFY_WIDTH}], got {verify_width}")
    if threads is not None and threads < 1:
        raise InvalidArgument.at("threads", f"must be positive, got {threads}")


def _check_device(device: str) -> None:
    try:
        open_device(device)
    except (ValueError, DeviceUnavailable) as error:
        raise InvalidArgument.at("device", str(error)) from error


def _per_prompt(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidArgument.at("sampling_params", f"{len(params)} given for {count} prompts")
    return params
