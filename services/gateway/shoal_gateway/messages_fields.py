"""The fields of an Anthropic Messages body that Shoal reads itself; all others are the recipe's."""

from __future__ import annotations

from typing import Any

from shoal_gateway.chat_fields import (
    MAX_TOKENS,
    MAX_USER_ID_BYTES,
    RECIPE_MODEL,
    ChatFields,
    read_chat_fields,
    refuse_cache_points,
)
from shoal_gateway.fields import Fields

_AS_IN_CHAT = ("model", "temperature", "top_p", "top_k", "stream", "seed", "ignore_eos", "shoal")
_OF_RECIPE = frozenset({"messages", "system", "tools", "tool_choice", "output_config", "thinking", "stop_sequences"})
_OF_RECIPE |= {"temperature", "top_p"}
MAX_SENT_TOKENS = 2**53
"""More than the model can write is lowered, as the hosted API does."""


def read_messages_fields(body: dict[str, Any], vocab_size: int) -> ChatFields:
    """The fields of a Messages request. Raises InvalidArgument, which names the field."""
    top = Fields(body)
    max_tokens = top.integer("max_tokens", 1, MAX_SENT_TOKENS)
    metadata = top.mapping("metadata") or Fields({})
    choice = top.mapping("tool_choice") or Fields({})
    as_chat: dict[str, Any] = {name: body.get(name) for name in _AS_IN_CHAT}
    as_chat["max_tokens"] = None if max_tokens is None else min(max_tokens, MAX_TOKENS)
    as_chat["user_id"] = metadata.text("user_id", MAX_USER_ID_BYTES)
    as_chat["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
    as_chat["reasoning_effort"] = (top.mapping("output_config") or Fields({})).effort_number("effort")
    return refuse_cache_points(read_chat_fields(as_chat, vocab_size))


def messages_body(body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
    """The body as the recipe takes it: its own model name, an effort that it has a name for."""
    inner = {key: value for key, value in body.items() if key in _OF_RECIPE}
    inner["model"] = RECIPE_MODEL
    if fields.max_tokens is not None:
        inner["max_tokens"] = fields.max_tokens
    if fields.effort_number is not None:
        inner["output_config"] = {**body["output_config"], "effort": "high"}
    if isinstance(body.get("tools"), list):
        inner["tools"] = [_without_default_type(tool) for tool in body["tools"]]
    return inner


def _without_default_type(tool: Any) -> Any:
    """A tool of the client's own may say so; the recipe takes every type for a tool that a server runs."""
    if isinstance(tool, dict) and tool.get("type") in (None, "custom"):
        return {key: value for key, value in tool.items() if key != "type"}
    return tool
