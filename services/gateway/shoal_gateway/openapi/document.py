"""The document itself: every path and method with what it takes and gives. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_gateway.openapi import answers, messages, requests, responses
from shoal_gateway.openapi.schema import Schema, ref

VERSION = "3.2.0"
"""The first that can tell what the events of a stream are."""

_COMPONENTS: dict[str, Schema] = {
    "ChatRequest": requests.CHAT,
    "CompletionRequest": requests.COMPLETION,
    "TokenizeRequest": requests.TOKENIZE,
    "DetokenizeRequest": requests.DETOKENIZE,
    "Message": requests.MESSAGE,
    "Tool": requests.TOOL,
    "ResponseFormat": requests.RESPONSE_FORMAT,
    "ShoalRequest": requests.SHOAL,
    "Chat": answers.CHAT,
    "ChatEvent": answers.CHAT_EVENT,
    "Completion": answers.COMPLETION,
    "CompletionEvent": answers.COMPLETION_EVENT,
    "MessagesRequest": messages.REQUEST,
    "MessagesAnswer": messages.ANSWER,
    "MessagesEvent": messages.EVENT,
    "MessagesError": messages.ERROR,
    "CountedTokens": messages.COUNTED,
    "ResponsesRequest": responses.REQUEST,
    "ResponsesAnswer": responses.ANSWER,
    "ResponsesEvent": responses.EVENT,
    "Tokenized": answers.TOKENIZED,
    "Detokenized": answers.DETOKENIZED,
    "Model": answers.MODEL,
    "Models": answers.MODELS,
    "Document": {"type": "object", "required": ["openapi", "paths"]},
    "Alive": answers.ALIVE,
    "Ready": answers.READY,
    "Usage": answers.USAGE,
    "ShoalAnswer": answers.SHOAL,
    "Error": answers.ERROR,
}

_ERRORS = {
    "400": "The request is wrong: `param` names the field, where one is.",
    "401": "No API key, or one that is not known.",
    "403": "The key may not do this.",
    "404": "No such model or path.",
    "405": "The path is not served by this method.",
    "408": "The client did not send the body in time.",
    "413": "The body is over the limit.",
    "429": "A limit of the key is reached. `retry-after` says for how long.",
    "500": "A fault of the gateway's own.",
    "503": "The mesh has no room for the request, or is not ready. `retry-after` says when to ask again.",
    "504": "The request's time is over.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. Names are those of components.

    takes, gives   body of the request, body of a 200; no `takes` where there is no body
    event          data of one event, where the answer may be a stream
    example        a body that is answered
    also_gives     bodies of other statuses than 200 that are no errors
    has_done       such a stream ends with `[DONE]`
    error          body of the errors
    """

    summary: str
    gives: str
    takes: str | None = None
    event: str | None = None
    example: Mapping[str, Any] | None = None
    also_gives: Mapping[str, str] | None = None
    has_done: bool = True
    error: str = "Error"


_MODEL = "deepseek-flash"
_HELLO = [{"role": "user", "content": "Hello"}]
_CHAT = Operation(
    summary="Answers a conversation; a last assistant message with `prefix` is continued.",
    takes="ChatRequest",
    gives="Chat",
    event="ChatEvent",
    example={"model": _MODEL, "messages": _HELLO, "max_tokens": 16},
)
_COMPLETION = Operation(
    summary="Continues prompts, or fills the hole between prompt and suffix.",
    takes="CompletionRequest",
    gives="Completion",
    event="CompletionEvent",
    example={"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 16},
)
_MESSAGES = Operation(
    summary="Answers a conversation, as Anthropic's API does.",
    takes="MessagesRequest",
    gives="MessagesAnswer",
    event="MessagesEvent",
    has_done=False,
    error="MessagesError",
    example={"model": _MODEL, "max_tokens": 16, "messages": _HELLO},
)
_COUNT = Operation(
    summary="The prompt tokens of such a conversation.",
    takes="MessagesRequest",
    gives="CountedTokens",
    error="MessagesError",
    example={"model": _MODEL, "messages": _HELLO},
)
_RESPONSES = Operation(
    summary="Answers items of a conversation, as OpenAI's Responses do. Nothing is stored.",
    takes="ResponsesRequest",
    gives="ResponsesAnswer",
    event="ResponsesEvent",
    has_done=False,
    example={"model": _MODEL, "input": "Hello", "max_output_tokens": 16},
)
_MODELS = Operation(summary="The names that requests may use.", gives="Models")
_ONE_MODEL = Operation(summary="One of these names.", gives="Model")
_ALIVE = Operation(summary="The process runs.", gives="Alive")
_READY = Operation(summary="A request sent now would be served.", gives="Ready", also_gives={"503": "Ready"})

OPERATIONS: dict[str, dict[str, Operation]] = {
    "/chat/completions": {"POST": _CHAT},
    "/beta/chat/completions": {"POST": _CHAT},
    "/completions": {"POST": _COMPLETION},
    "/beta/completions": {"POST": _COMPLETION},
    "/responses": {"POST": _RESPONSES},
    "/messages": {"POST": _MESSAGES},
    "/anthropic/messages": {"POST": _MESSAGES},
    "/messages/count_tokens": {"POST": _COUNT},
    "/anthropic/messages/count_tokens": {"POST": _COUNT},
    "/tokenize": {
        "POST": Operation(
            summary="A text or a conversation as token ids.",
            takes="TokenizeRequest",
            gives="Tokenized",
            example={"prompt": "Hello"},
        )
    },
    "/detokenize": {
        "POST": Operation(
            summary="Token ids as text, special tokens spelled out.",
            takes="DetokenizeRequest",
            gives="Detokenized",
            example={"tokens": [42, 43]},
        )
    },
    "/models": {"GET": _MODELS},
    "/beta/models": {"GET": _MODELS},
    "/models/{model}": {"GET": _ONE_MODEL},
    "/beta/models/{model}": {"GET": _ONE_MODEL},
    "/openapi.json": {"GET": Operation(summary="This document.", gives="Document")},
    "/healthz": {"GET": _ALIVE},
    "/health": {"GET": _ALIVE},
    "/live": {"GET": _ALIVE},
    "/readyz": {"GET": _READY},
    "/ready": {"GET": _READY},
}


def document() -> dict[str, Any]:
    """The OpenAPI document. Paths stand without a version; every one answers behind /v1 too."""
    return {
        "openapi": VERSION,
        "info": {
            "title": "Shoal",
            "version": "1",
            "description": "Unknown fields of a body are ignored, except inside `shoal`. docs/api.md tells the rest.",
        },
        "servers": [{"url": "/"}, {"url": "/v1"}],
        "security": [{}, {"bearer": []}, {"api_key": []}],
        "paths": {
            path: {method.lower(): _operation(one, path) for method, one in methods.items()}
            for path, methods in OPERATIONS.items()
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "responses": {
                f"{name}{status}": {"description": told, "content": _json(name)}
                for name in ("Error", "MessagesError")
                for status, told in _ERRORS.items()
            },
            "schemas": _COMPONENTS,
        },
    }


def _operation(one: Operation, path: str) -> dict[str, Any]:
    content: dict[str, Any] = _json(one.gives)
    if one.event is not None:
        content["text/event-stream"] = {"itemSchema": answers.event(one.event, has_done=one.has_done)}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in _ERRORS:
        responses[status] = {"$ref": f"#/components/responses/{one.error}{status}"}
    for status, name in (one.also_gives or {}).items():
        responses[status] = {"description": "Not now.", "content": _json(name)}
    made: dict[str, Any] = {"summary": one.summary, "responses": responses}
    if "{model}" in path:
        made["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if one.takes is not None:
        body = _json(one.takes)
        body["application/json"]["examples"] = _examples(one)
        made["requestBody"] = {"required": True, "content": body}
    return made


def _examples(one: Operation) -> dict[str, Any]:
    body = dict(one.example or {})
    shown = {"whole": {"value": body}}
    if one.event is not None:
        shown["stream"] = {"value": {**body, "stream": True}}
    return shown


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(name)}}
