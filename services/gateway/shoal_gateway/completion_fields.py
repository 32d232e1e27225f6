"""The fields of a completions body: what it has in common with a chat, and what only it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import InvalidArgument
from shoal_common.sampling_limits import MAX_TOP_LOGPROBS

from shoal_gateway.chat_fields import MAX_CHOICES, ChatFields, read_chat_fields, refuse_cache_points
from shoal_gateway.fields import Fields

MAX_PROMPTS = 32
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_PROMPT_BYTES = 64 * 1024 * 1024
"""The limit on bodies is the nearer one."""
# Of a chat only; what completions do not know is ignored.
_CHAT_ONLY = frozenset({"max_completion_tokens", "parallel_tool_calls", "reasoning_effort"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFields:
    """Checked values; None where the client said nothing.

    prompts   one or more texts or non-empty lists of token ids, never mixed
    suffix    what follows the gap that is to be filled; None: the prompt is continued
    logprobs  how many of the best tokens are reported per position, beside the emitted one
    """

    common: ChatFields
    prompts: tuple[str, ...] | tuple[tuple[int, ...], ...]
    suffix: str | None
    echo: bool
    logprobs: int | None
    stop: tuple[str, ...]


def read_completion_fields(body: Mapping[str, Any], vocab_size: int, max_prompt_ids: int) -> CompletionFields:
    """The fields of a completions request. Raises InvalidArgument, which names the field."""
    as_chat = {key: value for key, value in body.items() if key not in _CHAT_ONLY}
    common = refuse_cache_points(read_chat_fields(as_chat, vocab_size))
    top = Fields(body)
    prompts = _prompts(body, vocab_size, max_prompt_ids)
    fields = CompletionFields(
        common=common,
        prompts=prompts,
        suffix=top.text("suffix", MAX_PROMPT_BYTES) or None,
        echo=top.boolean("echo") or False,
        logprobs=top.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        stop=_stop(body),
    )
    _check_best_of(top, common.choice_count)
    _check_together(fields)
    return fields


def _prompts(body: Mapping[str, Any], vocab_size: int, max_ids: int) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    given = body.get("prompt")
    if given is None:
        raise InvalidArgument.at("prompt", "is required")
    if isinstance(given, str):
        return (_text("prompt", given),)
    if not isinstance(given, list):
        raise InvalidArgument.at("prompt", "must be a text, a list of token ids, or a list of either")
    if not given:
        raise InvalidArgument.at("prompt", "must not be empty")
    if all(isinstance(one, str) for one in given):
        return tuple(_text(f"prompt[{index}]", one) for index, one in enumerate(_bounded(given)))
    if all(isinstance(one, list) for one in given):
        return tuple(_ids(f"prompt[{index}]", one, vocab_size, max_ids) for index, one in enumerate(_bounded(given)))
    if any(isinstance(one, str | list) for one in given):
        raise InvalidArgument.at("prompt", "must not mix texts, token ids and lists of them")
    return (_ids("prompt", given, vocab_size, max_ids),)


def _bounded(prompts: list[Any]) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise InvalidArgument.at("prompt", f"must have at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    return prompts


def _text(name: str, value: str) -> str:
    return Fields({name: value}).text(name, MAX_PROMPT_BYTES) or ""


def _ids(name: str, value: list[Any], vocab_size: int, max_ids: int) -> tuple[int, ...]:
    ids = Fields({name: value}).token_ids(name, vocab_size, max_ids)
    if not ids:
        raise InvalidArgument.at(name, "must hold at least one token id")
    return tuple(ids)


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop")
    if given is None:
        return ()
    if isinstance(given, str):
        return (_one_stop("stop", given),)
    values = Fields(body).items("stop", MAX_STOPS)
    return tuple(_one_stop(f"stop[{index}]", one) for index, one in enumerate(values))


def _one_stop(name: str, value: Any) -> str:
    text = Fields({name: value}).text(name, MAX_STOP_BYTES)
    if not text:
        raise InvalidArgument.at(name, "must be a text that is not empty")
    return text


def _check_best_of(top: Fields, choice_count: int) -> None:
    best_of = top.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != choice_count:
        raise InvalidArgument.at("best_of", f"must equal n ({choice_count}): no choices are made to be thrown away")


def _check_together(fields: CompletionFields) -> None:
    if fields.suffix is not None and not isinstance(fields.prompts[0], str):
        raise InvalidArgument.at("suffix", "needs a prompt that is text")
    if fields.suffix is not None and fields.echo and fields.logprobs is not None:
        raise InvalidArgument.at("echo", "cannot be combined with both suffix and logprobs")
    if fields.common.prompt_logprobs is not None:
        name = "shoal.prompt_logprobs"
        if len(fields.prompts) > 1:
            raise InvalidArgument.at(name, "needs a single prompt")
        if fields.echo and fields.logprobs is not None:
            raise InvalidArgument.at(name, "cannot be combined with both echo and logprobs, which say the same")
