"""Anthropic Messages: what is accepted and answered. Pure."""

from __future__ import annotations

from shoal_gateway.chat_fields import MAX_SEED, MAX_USER_ID_BYTES
from shoal_gateway.completion_fields import MAX_STOPS
from shoal_gateway.messages_fields import MAX_SENT_TOKENS
from shoal_gateway.openapi.requests import EFFORT, MAX_MODEL_BYTES, TOOL_NAME
from shoal_gateway.openapi.schema import (
    BOOLEAN,
    COUNT,
    NULL,
    STRING,
    Schema,
    accepts,
    answers,
    any_of,
    array,
    enum,
    integer,
    nullable,
    number,
    positive_number,
    ref,
    text,
    typed_event,
)

_TEXT = accepts({}, {"type": enum("text"), "text": STRING}, ignored=("cache_control", "citations"))
_RESULT = accepts({"content": any_of(STRING, array(_TEXT))}, {"type": enum("tool_result"), "tool_use_id": STRING})
_USE = accepts({}, {"type": enum("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}})
_THINKING = accepts({"signature": STRING}, {"type": enum("thinking"), "thinking": STRING})
_MESSAGE = accepts(
    {},
    {
        "role": enum("user", "assistant", "system"),
        "content": any_of(STRING, array(any_of(_TEXT, _RESULT, _USE, _THINKING), low=1)),
    },
)
_TOOL = accepts(
    {"description": STRING},
    {"name": TOOL_NAME, "input_schema": {"type": "object"}},
    ignored=("cache_control",),
)
_PARALLEL = {"disable_parallel_tool_use": BOOLEAN}
_CHOICE = any_of(
    accepts(_PARALLEL, {"type": enum("auto", "any", "none")}),
    accepts(_PARALLEL, {"type": enum("tool"), "name": STRING}),
)
_FORMAT = accepts({}, {"type": enum("json_schema"), "schema": {"type": "object"}})
_OUTPUT = accepts({"effort": EFFORT, "format": _FORMAT})

REQUEST = accepts(
    {
        "max_tokens": integer(1, MAX_SENT_TOKENS),
        "system": any_of(STRING, array(_TEXT)),
        "stop_sequences": array({"type": "string", "minLength": 1}, high=MAX_STOPS),
        "temperature": number(0, 2),
        "top_p": positive_number(1),
        "top_k": integer(0, 2**31),
        "stream": BOOLEAN,
        "thinking": accepts({"budget_tokens": COUNT}, {"type": enum("enabled", "disabled", "adaptive")}),
        "output_config": _OUTPUT,
        "tools": array(_TOOL),
        "tool_choice": _CHOICE,
        "metadata": accepts({"user_id": text(MAX_USER_ID_BYTES)}),
        "seed": integer(0, MAX_SEED),
        "ignore_eos": BOOLEAN,
        "shoal": ref("ShoalRequest"),
    },
    {"model": text(MAX_MODEL_BYTES), "messages": array(_MESSAGE, low=1)},
    ignored=(
        "billing_policy",
        "cache_control",
        "compaction",
        "container",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "mcp_servers",
        "output_format",
        "service_tier",
        "speed",
        "thread",
    ),
)
COUNTED = answers({"input_tokens": COUNT})

ERROR = answers(
    {
        "type": enum("error"),
        "error": answers({"type": STRING, "message": STRING, "param": nullable(STRING), "code": STRING}),
        "request_id": nullable(STRING),
    }
)
_USAGE = answers(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
        "service_tier": enum("standard"),
    }
)
_BLOCK = any_of(
    answers({"type": enum("text"), "text": STRING}),
    answers({"type": enum("thinking"), "thinking": STRING, "signature": STRING}),
    answers({"type": enum("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}}),
)
_STOP_REASON = enum("end_turn", "max_tokens", "stop_sequence", "tool_use")


def _message(stop_reason: Schema) -> Schema:
    return answers(
        {
            "id": STRING,
            "type": enum("message"),
            "role": enum("assistant"),
            "model": STRING,
            "content": array(_BLOCK),
            "stop_reason": stop_reason,
            "stop_sequence": nullable(STRING),
            "usage": _USAGE,
            "shoal": ref("ShoalAnswer"),
        }
    )


ANSWER = _message(_STOP_REASON)
_DELTA = any_of(
    answers({"type": enum("text_delta"), "text": STRING}),
    answers({"type": enum("thinking_delta"), "thinking": STRING}),
    answers({"type": enum("signature_delta"), "signature": STRING}),
    answers({"type": enum("input_json_delta"), "partial_json": STRING}),
)
_STOPPED = answers({"stop_reason": _STOP_REASON, "stop_sequence": nullable(STRING)})
EVENT = any_of(
    typed_event("message_start", {"message": _message(NULL)}),
    typed_event("content_block_start", {"index": COUNT, "content_block": _BLOCK}),
    typed_event("content_block_delta", {"index": COUNT, "delta": _DELTA}),
    typed_event("content_block_stop", {"index": COUNT}),
    typed_event("message_delta", {"delta": _STOPPED, "usage": _USAGE}),
    typed_event("message_stop", {}),
    typed_event("ping", {}),
    ERROR,
)
