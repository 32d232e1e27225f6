"""What the pinned SDKs can say against the page: every parameter is on it, and what is ignored changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.resources import messages as anthropic_messages
from anthropic.resources.beta import messages as anthropic_beta
from openai.resources import chat, completions, responses
from shoal_gateway.completions import CompletionEncoder
from shoal_gateway.dialect import CHAT_DIALECT, MESSAGES_DIALECT, RESPONSES_DIALECT
from shoal_gateway.encode import Encoder, Prepared
from shoal_gateway.openapi.document import document
from shoal_gateway.openapi.schema import IGNORED

SCHEMAS = document()["components"]["schemas"]
# Of the call, not of the body: Anthropic's last three are headers.
NO_FIELDS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
NO_FIELDS |= {"betas", "user_profile_id", "workspace_id"}
HI = [{"role": "user", "content": "Hi"}]
SAME = {"model": "deepseek-flash", "seed": 3}


@pytest.mark.parametrize(
    ("name", "create"),
    [
        ("ChatRequest", chat.Completions.create),
        ("CompletionRequest", completions.Completions.create),
        ("ResponsesRequest", responses.Responses.create),
        ("MessagesRequest", anthropic_messages.Messages.create),
        ("MessagesRequest", anthropic_messages.Messages.count_tokens),
        ("MessagesRequest", anthropic_beta.Messages.create),
        ("MessagesRequest", anthropic_beta.Messages.count_tokens),
    ],
)
def test_every_parameter_of_a_client_is_described(name: str, create: Callable[..., Any]) -> None:
    parameters = set(inspect.signature(create).parameters) - NO_FIELDS
    assert len(parameters) >= 10
    assert parameters <= set(SCHEMAS[name]["properties"])


def ignored() -> list[tuple[str, str]]:
    names = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest")
    fields = [(name, *field) for name in names for field in SCHEMAS[name]["properties"].items()]
    return [(name, field) for name, field, schema in fields if schema.get("description") == IGNORED]


@pytest.mark.parametrize(("name", "field"), ignored())
def test_a_field_that_is_ignored_may_hold_anything(encoder: Encoder, name: str, field: str) -> None:
    def prepared(value: Any) -> tuple[list[int], bytes, int, str]:
        extra = {} if value is ... else {field: value}
        one = PREPARE[name](encoder, extra)
        return one.prompt_ids, one.params.SerializeToString(deterministic=True), one.choice_count, one.user_id

    plain = prepared(...)
    for value in (None, -5, 0.5, True, "x", [1], {"a": {"type": "image"}}):
        assert prepared(value) == plain, value


PREPARE: dict[str, Callable[[Encoder, dict[str, Any]], Prepared]] = {
    "ChatRequest": lambda encoder, extra: encoder.chat_now({**SAME, "messages": HI, **extra}, CHAT_DIALECT).request,
    "CompletionRequest": lambda encoder, extra: (
        CompletionEncoder(encoder).prepare_now({**SAME, "prompt": "Hi", **extra}).requests[0]
    ),
    "ResponsesRequest": lambda encoder, extra: (
        encoder.chat_now({**SAME, "input": HI, **extra}, RESPONSES_DIALECT).request
    ),
    "MessagesRequest": lambda encoder, extra: (
        encoder.chat_now({**SAME, "messages": HI, **extra}, MESSAGES_DIALECT).request
    ),
}
