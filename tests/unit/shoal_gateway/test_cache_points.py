"""A cache point lies where a later conversation with the same messages parts from this one."""

from __future__ import annotations

from typing import Any

import pytest
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.errors import InvalidArgument
from shoal_gateway.dialect import MESSAGES_DIALECT
from shoal_gateway.encode import Encoder
from shoal_gateway.generation import prepare_now
from shoal_gateway.text import detokenize

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "assistant", "content": "An answer", "reasoning_content": "so"},
    {"role": "user", "content": "Second question"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
BODY: dict[str, Any] = {"model": "deepseek-flash", "messages": MESSAGES, "tools": TOOLS, "reasoning_effort": 30}


def points(encoder: Encoder, indices: list[int]) -> tuple[int, ...]:
    return encoder.chat_now({**BODY, "shoal": {"cache_points": indices}}).request.cache_points


def test_every_message_up_to_the_point_is_before_it_and_none_after(encoder: Encoder) -> None:
    ids = encoder.chat_now(BODY).request.prompt_ids
    for index, message in enumerate(MESSAGES):
        (point,) = points(encoder, [index])
        shown = message["content"] or message["reasoning_content"]
        before, after = (detokenize(part, encoder.tokenizer) for part in (ids[:point], ids[point:]))
        assert shown in before
        assert all(later["content"] not in after or later["content"] == "" for later in MESSAGES[: index + 1])
        assert all(later["content"] in after for later in MESSAGES[index + 1 :])


def test_another_conversation_with_the_same_messages_begins_with_the_same_tokens(encoder: Encoder) -> None:
    ids = encoder.chat_now(BODY).request.prompt_ids
    (point,) = points(encoder, [4])
    other = {**BODY, "messages": [*MESSAGES[:5], {"role": "user", "content": "Something else"}]}
    other_ids = encoder.chat_now(other).request.prompt_ids
    assert other_ids[:point] == ids[:point]
    assert point > 50


def test_points_ascend_whatever_their_order(encoder: Encoder) -> None:
    several = points(encoder, [4, 1, 1, 3])
    assert list(several) == sorted({points(encoder, [index])[0] for index in (1, 3, 4)})
    assert points(encoder, []) == ()


def test_the_last_message_s_point_is_the_prompt_s_end(encoder: Encoder) -> None:
    assert points(encoder, [5]) == (len(encoder.chat_now(BODY).request.prompt_ids),)


@pytest.mark.parametrize("wrong", [[6], [-1], ["0"], [None], "0", [0] * 9, [2**40], [True]])
def test_what_is_no_message_is_refused_by_name(encoder: Encoder, wrong: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        points(encoder, wrong)
    assert caught.value.violations[0].field.startswith("shoal.cache_points")


def test_messages_of_other_apis_are_not_counted(encoder: Encoder) -> None:
    body = {"model": "deepseek-flash", "messages": MESSAGES[1:2], "shoal": {"cache_points": [0]}}
    with pytest.raises(InvalidArgument, match="cache_points"):
        encoder.chat_now(body, MESSAGES_DIALECT)


def test_grpc_asks_in_the_same_way(encoder: Encoder) -> None:
    roles = {"system": chat_pb2.CHAT_ROLE_SYSTEM, "user": chat_pb2.CHAT_ROLE_USER}
    chat = chat_pb2.ChatPrompt(
        messages=[chat_pb2.ChatMessage(role=roles[one["role"]], content=one["content"]) for one in MESSAGES[:2]],
        cache_points=[0],
    )
    (point,) = prepare_now(generation_pb2.Generation(chat=chat), encoder).request.cache_points
    body = {"model": "deepseek-flash", "messages": MESSAGES[:2], "shoal": {"cache_points": [0]}}
    assert encoder.chat_now(body).request.cache_points == (point,)
    chat.cache_points[:] = [0] * 9
    with pytest.raises(InvalidArgument, match="at most 8"):
        prepare_now(generation_pb2.Generation(chat=chat), encoder)
    chat.cache_points[:] = [2]
    with pytest.raises(InvalidArgument, match="below 2"):
        prepare_now(generation_pb2.Generation(chat=chat), encoder)
