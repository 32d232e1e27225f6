"""From what a client asked for to the parameters that a worker samples with."""

from __future__ import annotations

import re
import struct
from typing import Literal, get_args

from deepseek_recipe import InferenceOptions
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import InvalidArgument, MeshError
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_FORCED_IDS, MAX_TOP_LOGPROBS

from shoal_gateway.chat_fields import MAX_STOP_TOKENS, ChatFields
from shoal_gateway.refusals import ContextLengthExceeded

_Field = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
]
_ECHOED: tuple[_Field, ...] = get_args(_Field)
_IN_EXTENSION = frozenset({"ignore_eos", "stop_token_ids", "bad_words", "forced_ids", "prompt_logprobs"})
_WORKER_PATH = "params."
_COUNTS: tuple[Literal["top_logprobs", "prompt_logprobs"], ...] = ("top_logprobs", "prompt_logprobs")
_RANGES: dict[_Field, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


def chat_params(
    fields: ChatFields, recipe: InferenceOptions, *, is_thinking: bool, max_tokens: int, seed: int
) -> sampling_pb2.SamplingParams:
    """Parameters of a chat request.

    The recipe rewrites sampling as the hosted API does; while the model thinks, that API also ignores penalties and
    the like without a word. `as_sent` takes everything as the client sent it.
    """
    params = _plain_params(fields, prompt_logprobs=fields.prompt_logprobs, seed=seed)
    params.max_tokens = max_tokens
    if fields.min_tokens:
        set_min_tokens(params, fields.min_tokens)
    if recipe.logprobs:
        params.top_logprobs = recipe.top_logprobs or 0
    if fields.as_sent:
        _set_sent(params, fields)
    else:
        params.temperature = _double(recipe.temperature, fields.temperature)
        params.top_p = _double(recipe.top_p, fields.top_p)
    if fields.as_sent or not is_thinking:
        _extras(params, fields)
    return params


def text_params(
    fields: ChatFields, *, top_logprobs: int | None, prompt_logprobs: int | None, seed: int
) -> sampling_pb2.SamplingParams:
    """Parameters of a completion, all as the client sent them; how many tokens it may have is not among them."""
    params = _plain_params(fields, prompt_logprobs=prompt_logprobs, seed=seed)
    if top_logprobs is not None:
        params.top_logprobs = top_logprobs
    _set_sent(params, fields)
    _extras(params, fields)
    return params


def _plain_params(fields: ChatFields, *, prompt_logprobs: int | None, seed: int) -> sampling_pb2.SamplingParams:
    """What no API rewrites."""
    params = sampling_pb2.SamplingParams(
        seed=seed, ignore_eos=fields.ignore_eos, stop_token_ids=fields.stop_token_ids, forced_ids=fields.forced_ids
    )
    if prompt_logprobs is not None:
        params.prompt_logprobs = prompt_logprobs
    return params


def set_min_tokens(params: sampling_pb2.SamplingParams, min_tokens: int | None) -> None:
    """After max_tokens, which may be what the context has left. Raises InvalidArgument where that is less."""
    if (min_tokens or 0) > params.max_tokens:
        raise InvalidArgument.at("min_tokens", f"must be at most max_tokens, {params.max_tokens}")
    if min_tokens:
        params.min_tokens = min_tokens


def _set_sent(params: sampling_pb2.SamplingParams, fields: ChatFields) -> None:
    params.temperature = 1.0 if fields.temperature is None else fields.temperature
    params.top_p = 1.0 if fields.top_p is None else fields.top_p


def _extras(params: sampling_pb2.SamplingParams, fields: ChatFields) -> None:
    if fields.top_k is not None:
        params.top_k = fields.top_k
    if fields.min_p is not None:
        params.min_p = fields.min_p
    if fields.presence_penalty is not None:
        params.presence_penalty = fields.presence_penalty
    if fields.frequency_penalty is not None:
        params.frequency_penalty = fields.frequency_penalty
    if fields.repetition_penalty is not None:
        params.repetition_penalty = fields.repetition_penalty
    if fields.logit_bias:
        params.logit_bias.update(fields.logit_bias)


def check_params(params: sampling_pb2.SamplingParams, *, vocab_size: int, path: str) -> None:
    """Raises InvalidArgument for values outside of what SamplingParams promises. Absent fields are fine."""
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if params.HasField(name) and not low <= value <= high:
            raise InvalidArgument.at(f"{path}{name}", f"must be in [{low}, {high}], got {value}")
    if params.HasField("top_p") and params.top_p == 0.0:
        raise InvalidArgument.at(f"{path}top_p", "must be above 0")
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise InvalidArgument.at(f"{path}max_tokens", "must be at least 1")
    for field in _COUNTS:
        count = getattr(params, field)
        if params.HasField(field) and count > MAX_TOP_LOGPROBS:
            raise InvalidArgument.at(f"{path}{field}", f"must be in [0, {MAX_TOP_LOGPROBS}], got {count}")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument.at(f"{path}stop_token_ids", f"must have at most {MAX_STOP_TOKENS} entries")
    for index, token_id in enumerate(params.stop_token_ids):
        _check_token(token_id, vocab_size, f"{path}stop_token_ids[{index}]")
    for token_id, bias in params.logit_bias.items():
        _check_token(token_id, vocab_size, f"{path}logit_bias")
        if not -100 <= bias <= 100:
            raise InvalidArgument.at(f"{path}logit_bias", f"must be in [-100, 100], got {bias}")
    _check_sequences(params, vocab_size, path)


def _check_sequences(params: sampling_pb2.SamplingParams, vocab_size: int, path: str) -> None:
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidArgument.at(f"{path}bad_words", f"must have at most {MAX_BAD_WORDS} entries")
    for index, word in enumerate(params.bad_words):
        name = f"{path}bad_words[{index}]"
        if not 1 <= len(word.ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument.at(name, f"must have 1 to {MAX_BAD_WORD_TOKENS} ids, got {len(word.ids)}")
        _check_token(max(word.ids), vocab_size, name)
    if len(params.forced_ids) > MAX_FORCED_IDS:
        raise InvalidArgument.at(f"{path}forced_ids", f"must have at most {MAX_FORCED_IDS} entries")
    for index, token_id in enumerate(params.forced_ids):
        _check_token(token_id, vocab_size, f"{path}forced_ids[{index}]")


def _check_token(token_id: int, vocab_size: int, path: str) -> None:
    if token_id >= vocab_size:
        raise InvalidArgument.at(
            path,
            f"must be a token id in [0, {vocab_size - 1}], got {token_id}",
            reason="TOKEN_OUT_OF_RANGE",
        )


def check_prompt_ids(ids: list[int], *, vocab_size: int, path: str) -> None:
    """Raises InvalidArgument if the prompt is empty or has an id outside of the vocabulary."""
    if not ids:
        raise InvalidArgument.at(path, "must hold at least one token id")
    if max(ids) >= vocab_size:
        index = next(position for position, token_id in enumerate(ids) if token_id >= vocab_size)
        _check_token(ids[index], vocab_size, f"{path}[{index}]")


def fit_context(prompt_tokens: int, wanted: int | None, default: int, context: int) -> int:
    """Output tokens a choice may have: `wanted`, else `default` lowered to the room left.

    Raises ContextLengthExceeded if the prompt, or the prompt and what was asked for, does not fit `context`.
    """
    total = prompt_tokens + (1 if wanted is None else wanted)
    if total > context:
        asked = "" if wanted is None else f" and {wanted} for the output"
        raise ContextLengthExceeded(
            # Clients tell this error from others by these words.
            f"this model's maximum context length is {context} tokens, the request needs {prompt_tokens} for the prompt"
            f"{asked}",
            context_tokens=context,
            prompt_tokens=prompt_tokens,
            max_tokens=wanted or "default",
        )
    return min(default, context - prompt_tokens) if wanted is None else wanted


def as_asked(error: MeshError, path: str) -> MeshError:
    """A worker's error about a parameter, naming the client's own field.

    path   of the parameters in a gRPC request; empty: over HTTP, at the top of the body or in its extension
    """
    if not isinstance(error, InvalidArgument) or not error.violations:
        return error
    said = error.violations[0]
    if not said.field.startswith(_WORKER_PATH):
        return error
    name = said.field.removeprefix(_WORKER_PATH)
    is_extension = not path and re.split(r"[.\[]", name, maxsplit=1)[0] in _IN_EXTENSION
    return InvalidArgument.at(f"{'shoal.' if is_extension else path}{name}", said.description, reason=error.reason)


def applied(params: sampling_pb2.SamplingParams) -> dict[str, float | int | bool]:
    """What was applied, for the client: all that is set, the seed apart."""
    return {name: getattr(params, name) for name in _ECHOED if params.HasField(name)}


def _double(single: float | None, sent: float | None) -> float:
    """The recipe computes in single precision; the client's own double, or the shortest decimal, means the same."""
    if single is None:
        return 1.0
    if single == 1.0 and sent is None:
        return 1.0
    if sent is not None and struct.unpack("f", struct.pack("f", sent))[0] == single:
        return sent
    for digits in range(1, 10):
        short = float(f"{single:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short))[0] == single:
            return short
    return single
