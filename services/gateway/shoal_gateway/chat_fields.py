"""The fields of a chat body that Shoal reads itself; all others are the recipe's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_common.constraints import MAX_TEXT_BYTES
from shoal_common.errors import InvalidArgument
from shoal_common.sampling_limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_FORCED_IDS, MAX_TOP_LOGPROBS

from shoal_gateway.fields import Fields

RECIPE_MODEL = "DeepSeek-V4.1-Flash"
"""The only name by which the recipe's converter knows this model, whatever it is served as."""
MAX_CHOICES = 8
MAX_TOKENS = 393_216
"""The hosted API's bound on max_tokens; the context is the nearer one."""
MAX_SEED = 2**64 - 1
MAX_STOP_TOKENS = 64
MAX_USER_ID_BYTES = 512
MAX_CACHE_POINTS = 8
MAX_MESSAGE_INDEX = 2**31
MAX_BIASES = 1024
MAX_BAD_WORD_BYTES = 1024
_EXTENSION = frozenset({"sampling", "ignore_eos", "stop_token_ids", "determinism"})
_EXTENSION |= {"bad_words", "forced_ids", "prompt_logprobs", "seed", "cache_points", "ebnf"}
# Others are replaced by ours before the recipe sees the body: it knows one choice, tier names and its own model names
# only. What it does not read is kept from it: it would refuse the body for how deep that is nested.
_OF_RECIPE = frozenset({"messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "thinking"})
_OF_RECIPE |= {"stop", "logprobs", "top_logprobs", "temperature", "top_p", "presence_penalty", "frequency_penalty"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFields:
    """Checked values; None where the client said nothing."""

    model: str
    choice_count: int
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    is_stream: bool
    include_usage: bool
    as_sent: bool
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    bad_words: tuple[str | tuple[int, ...], ...]
    forced_ids: tuple[int, ...]
    prompt_logprobs: int | None
    cache_points: tuple[int, ...]
    """Indices of messages after which a snapshot is kept."""
    ebnf: str | None
    """The grammar of the answer."""
    is_exact: bool
    is_parallel: bool
    effort_number: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    user_id: str


def read_chat_fields(body: dict[str, Any], vocab_size: int) -> ChatFields:
    """The fields of a chat completion request. Raises InvalidArgument, which names the field."""
    top = Fields(body)
    extension = top.mapping("shoal") or Fields({})
    extension.refuse_unknown(_EXTENSION)
    max_tokens = top.integer("max_completion_tokens", 1, MAX_TOKENS)
    old_max_tokens = top.integer("max_tokens", 1, MAX_TOKENS)
    ignore_eos = extension.boolean("ignore_eos")
    options = top.mapping("stream_options")
    seed = extension.integer("seed", 0, MAX_SEED)
    sent_seed = top.integer("seed", 0, MAX_SEED)
    top_p = top.number("top_p", 0, 1)
    if top_p == 0.0:
        raise InvalidArgument.at("top_p", "must be above 0")
    wanted = old_max_tokens if max_tokens is None else max_tokens
    min_tokens = top.integer("min_tokens", 0, MAX_TOKENS)
    if wanted is not None and (min_tokens or 0) > wanted:
        raise InvalidArgument.at("min_tokens", f"must be at most max_tokens, {wanted}")
    model = top.text("model", 256)
    if model is None:
        raise InvalidArgument.at("model", "is required")
    return ChatFields(
        model=model,
        choice_count=top.integer("n", 1, MAX_CHOICES) or 1,
        seed=sent_seed if seed is None else seed,
        max_tokens=wanted,
        min_tokens=min_tokens,
        is_stream=top.boolean("stream") or False,
        include_usage=bool(options and options.boolean("include_usage")),
        as_sent=_is_as_sent(extension),
        ignore_eos=bool(top.boolean("ignore_eos") if ignore_eos is None else ignore_eos),
        stop_token_ids=tuple(extension.token_ids("stop_token_ids", vocab_size, MAX_STOP_TOKENS) or ()),
        bad_words=_bad_words(extension, vocab_size),
        forced_ids=tuple(extension.token_ids("forced_ids", vocab_size, MAX_FORCED_IDS) or ()),
        prompt_logprobs=extension.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
        cache_points=_cache_points(extension),
        ebnf=extension.text("ebnf", MAX_TEXT_BYTES),
        is_exact=_is_exact(extension),
        is_parallel=top.boolean("parallel_tool_calls") is not False,
        effort_number=top.effort_number("reasoning_effort"),
        temperature=top.number("temperature", 0, 2),
        top_p=top_p,
        top_k=top.integer("top_k", 0, 2**31),
        min_p=top.number("min_p", 0, 1),
        presence_penalty=top.number("presence_penalty", -2, 2),
        frequency_penalty=top.number("frequency_penalty", -2, 2),
        repetition_penalty=top.number("repetition_penalty", 0.01, 100),
        logit_bias=_logit_bias(body, vocab_size),
        user_id=top.text("user_id", MAX_USER_ID_BYTES) or "",
    )


def refuse_cache_points(fields: ChatFields) -> ChatFields:
    """`fields`, of an API whose messages are not those of the prompt one by one. Raises InvalidArgument."""
    if fields.cache_points:
        raise InvalidArgument.at("shoal.cache_points", "is supported by Chat Completions only")
    return fields


def recipe_body(body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
    """The body as the recipe takes it: one choice, its own model name, an effort it has a name for."""
    inner = {key: value for key, value in body.items() if key in _OF_RECIPE}
    inner["model"] = RECIPE_MODEL
    if fields.max_tokens is not None:
        inner["max_tokens"] = fields.max_tokens
    if fields.effort_number is not None:
        inner["reasoning_effort"] = "high"
    elif body.get("reasoning_effort") is not None:
        inner["reasoning_effort"] = body["reasoning_effort"]
    messages = body.get("messages")
    if isinstance(messages, list):
        inner["messages"] = [_with_known_role(message) for message in messages]
    return inner


def _with_known_role(message: Any) -> Any:
    """OpenAI's `developer` is what the model was trained to see as `system`."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _is_as_sent(extension: Fields) -> bool:
    sampling = extension.text("sampling", 64)
    if sampling not in (None, "as_sent"):
        raise InvalidArgument.at(extension.name("sampling"), 'must be "as_sent"')
    return sampling is not None


def _is_exact(extension: Fields) -> bool:
    determinism = extension.text("determinism", 64)
    if determinism not in (None, "exact", "best_effort"):
        raise InvalidArgument.at(extension.name("determinism"), 'must be "exact" or "best_effort"')
    return determinism == "exact"


def _cache_points(extension: Fields) -> tuple[int, ...]:
    name = extension.name("cache_points")
    entries = {f"[{index}]": one for index, one in enumerate(extension.items("cache_points", MAX_CACHE_POINTS))}
    checked = Fields(entries, name)
    indices = [checked.integer(key, 0, MAX_MESSAGE_INDEX) for key in entries]
    if None in indices:
        raise InvalidArgument.at(name, "must be a list of message indices")
    return tuple(index for index in indices if index is not None)


def _bad_words(extension: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """Texts and lists of token ids."""
    name = extension.name("bad_words")
    given = extension.items("bad_words", MAX_BAD_WORDS)
    words: list[str | tuple[int, ...]] = []
    for index, one in enumerate(given):
        entry = Fields({f"[{index}]": one}, name)
        if one in ("", [], None):
            raise InvalidArgument.at(entry.name(f"[{index}]"), "must not be empty")
        if isinstance(one, str):
            words.append(entry.text(f"[{index}]", MAX_BAD_WORD_BYTES) or "")
        else:
            words.append(tuple(entry.token_ids(f"[{index}]", vocab_size, MAX_BAD_WORD_TOKENS) or ()))
    return tuple(words)


def _logit_bias(body: dict[str, Any], vocab_size: int) -> dict[int, float]:
    biases = body.get("logit_bias")
    if biases is None:
        return {}
    if not isinstance(biases, dict):
        raise InvalidArgument.at("logit_bias", "must be an object of token id to bias")
    if len(biases) > MAX_BIASES:
        raise InvalidArgument.at("logit_bias", f"must have at most {MAX_BIASES} entries")
    values = Fields(biases, "logit_bias.")
    checked = {}
    for key in biases:
        # isdecimal alone also takes digits of other scripts.
        if not (len(key) <= 10 and key.isascii() and key.isdecimal() and int(key) < vocab_size):
            raise InvalidArgument.at("logit_bias", f"keys must be token ids in [0, {vocab_size - 1}]")
        checked[int(key)] = values.number(key, -100, 100) or 0.0
    return checked
