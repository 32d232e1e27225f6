"""The fields of a Responses body that Shoal reads itself; all others are the recipe's."""

from __future__ import annotations

from typing import Any

from shoal_common.errors import InvalidArgument

from shoal_gateway.chat_fields import (
    MAX_TOKENS,
    MAX_USER_ID_BYTES,
    RECIPE_MODEL,
    ChatFields,
    read_chat_fields,
    refuse_cache_points,
)
from shoal_gateway.fields import Fields

_AS_IN_CHAT = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "seed", "ignore_eos")
_AS_IN_CHAT_TOO = ("shoal", "user_id")
_OF_RECIPE = frozenset({"input", "instructions", "tools", "tool_choice", "reasoning", "text", "user"})
_OF_RECIPE |= {"max_output_tokens", "temperature", "top_p", "top_logprobs"}
_PARTS = frozenset({"input_text", "output_text", "input_audio", "input_video", "text", "refusal", "reasoning_text"})
_STORED = ("previous_response_id", "conversation", "prompt")
_NOT_STORED = "answers are not stored here: send the whole conversation as input"
MAX_METADATA = 16
MAX_METADATA_BYTES = 512


def read_responses_fields(body: dict[str, Any], vocab_size: int) -> ChatFields:
    """The fields of a Responses request. Raises InvalidArgument, which names the field."""
    top = Fields(body)
    _refuse_what_is_not_here(body, top)
    as_chat: dict[str, Any] = {name: body.get(name) for name in _AS_IN_CHAT + _AS_IN_CHAT_TOO}
    as_chat["max_tokens"] = top.integer("max_output_tokens", 1, MAX_TOKENS)
    as_chat["reasoning_effort"] = (top.mapping("reasoning") or Fields({})).effort_number("effort")
    return refuse_cache_points(read_chat_fields(as_chat, vocab_size))


def responses_body(body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
    """The body as the recipe takes it: its own model name, an effort that it has a name for."""
    inner = {key: value for key, value in body.items() if key in _OF_RECIPE}
    inner["model"] = RECIPE_MODEL
    if fields.effort_number is not None:
        inner["reasoning"] = {**body["reasoning"], "effort": "high"}
    if isinstance(text := body.get("text"), dict):
        inner["text"] = _without_null(text, "format")
    if isinstance(items := body.get("input"), list):
        inner["input"] = [_without_null(item, "type") for item in items]
    return inner


def _without_null(value: Any, key: str) -> Any:
    """Where the recipe takes null for a value of the wrong kind."""
    if isinstance(value, dict) and key in value and value[key] is None:
        return {name: one for name, one in value.items() if name != key}
    return value


def echoed(body: dict[str, Any]) -> dict[str, Any]:
    """What response objects repeat of the request beyond what the recipe does. Raises InvalidArgument."""
    top = Fields(body)
    values: dict[str, Any] = {"parallel_tool_calls": top.boolean("parallel_tool_calls") is not False}
    for name in ("safety_identifier", "prompt_cache_key"):
        values[name] = top.text(name, MAX_USER_ID_BYTES)
    metadata = top.mapping("metadata")
    if metadata is not None:
        sent = body["metadata"]
        if len(sent) > MAX_METADATA:
            raise InvalidArgument.at("metadata", f"must have at most {MAX_METADATA} entries")
        values["metadata"] = {key: metadata.text(key, MAX_METADATA_BYTES) for key in sent}
    effort = (top.mapping("reasoning") or Fields({})).effort_number("effort")
    if effort is not None:
        values["reasoning"] = {"effort": effort, "summary": None}
    return values


def _refuse_what_is_not_here(body: dict[str, Any], top: Fields) -> None:
    for name in _STORED:
        if body.get(name) is not None:
            raise InvalidArgument.at(name, _NOT_STORED, reason="NOT_STORED")
    if top.boolean("background"):
        raise InvalidArgument.at(
            "background", "is not supported: the answer would have to be stored", reason="NOT_STORED"
        )
    items = body.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if kind == "item_reference" or (kind is None and "id" in item and "role" not in item):
            raise InvalidArgument.at(f"input[{index}]", _NOT_STORED, reason="NOT_STORED")
        if isinstance(kind, str) and kind in _PARTS:
            # The recipe would leave it out, as it does items of which it knows nothing.
            where = f"input[{index}].type"
            raise InvalidArgument.at(where, f"{kind} is a part of a message's content, not an item")
