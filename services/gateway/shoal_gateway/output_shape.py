"""The recipe's generators, one per API: what makes chunks of output, and what their JSON says of the answer's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import orjson
from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionChunkGenerator,
    ChatCompletionRequest,
    ConversationRequest,
    MessagesChunkGenerator,
    MessagesRequest,
    MessagesStreamEvent,
    ResponsesChunkGenerator,
    ResponsesEcho,
    ResponsesRequest,
    ResponsesStreamEvent,
)
from shoal.common.v1 import sampling_pb2

from shoal_gateway.journal import FinishReason

Chunk: TypeAlias = ChatCompletionChunk | MessagesStreamEvent | ResponsesStreamEvent
Generator: TypeAlias = ChatCompletionChunkGenerator | MessagesChunkGenerator | ResponsesChunkGenerator
_REASONS: Mapping[str, FinishReason] = {
    "length": sampling_pb2.FINISH_REASON_LENGTH,
    "max_tokens": sampling_pb2.FINISH_REASON_LENGTH,
    "tool_calls": sampling_pb2.FINISH_REASON_TOOL_CALLS,
    "tool_use": sampling_pb2.FINISH_REASON_TOOL_CALLS,
}
"""What Chat and Messages call them; anything else is a stop."""
_BLOCK_START = '{"type":"content_block_start",'
_TOOL_BLOCK = '"content_block":{"type":"tool_use",'
_ITEM_ADDED = '{"type":"response.output_item.added",'
_CALL_ITEMS = ('"item":{"type":"function_call",', '"item":{"type":"custom_tool_call",')


@dataclass(frozen=True, slots=True)
class Ended:
    """How a choice ended, by its last chunks."""

    reason: FinishReason
    reasoning_tokens: int
    """0 where the API does not count them."""


class OutputShape(Protocol):
    """What one API makes of output."""

    def generator(self, converted: ConversationRequest, request_id: str) -> Generator:
        """A new generator for one choice of a request."""

    def begins_call(self, chunk_json: str) -> bool:
        """A chunk with which a tool call begins."""

    def ended(self, chunks: Sequence[Chunk]) -> Ended:
        """The end, from chunks of which the last is the last of the choice."""


class ChatShape:
    """Chat Completions. Ids and names are put in by whoever writes the answer: they are the same for all choices."""

    def generator(self, converted: ConversationRequest, request_id: str) -> Generator:
        """With an empty id and name."""
        return ChatCompletionRequest.chunk_generator(converted, "", "")

    def begins_call(self, chunk_json: str) -> bool:
        """Any fragment of one will do."""
        return '"tool_calls":[' in chunk_json

    def ended(self, chunks: Sequence[Chunk]) -> Ended:
        """The last chunk tells all."""
        last = orjson.loads(chunks[-1].to_json())
        details = (last["usage"] or {}).get("completion_tokens_details") or {}
        reason = _REASONS.get(last["choices"][0]["finish_reason"], sampling_pb2.FINISH_REASON_STOP)
        return Ended(reason, int(details.get("reasoning_tokens") or 0))


CHAT = ChatShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesShape:
    """Anthropic Messages; a thinking block's signature is the answer's id, which nobody checks."""

    model: str

    def generator(self, converted: ConversationRequest, request_id: str) -> Generator:
        """Of a message named after the request."""
        return MessagesRequest.chunk_generator(converted, f"msg_{request_id}", self.model)

    def begins_call(self, chunk_json: str) -> bool:
        """The start of such a block."""
        return chunk_json.startswith(_BLOCK_START) and _TOOL_BLOCK in chunk_json

    def ended(self, chunks: Sequence[Chunk]) -> Ended:
        """The last but one, message_delta, has the reason."""
        delta = orjson.loads(chunks[-2].to_json())["delta"]
        return Ended(_REASONS.get(delta["stop_reason"], sampling_pb2.FINISH_REASON_STOP), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesShape:
    """Responses."""

    model: str
    echo: ResponsesEcho
    """What the response objects report of the request."""
    namespaces: Mapping[str, tuple[str, str]]
    """Names of tools that are declared inside a namespace."""

    def generator(self, converted: ConversationRequest, request_id: str) -> Generator:
        """Of a response named after the request."""
        made = ResponsesRequest.chunk_generator(converted, f"resp_{request_id}", self.model)
        return made.with_namespace_tool_map(dict(self.namespaces)).with_echo(self.echo)

    def begins_call(self, chunk_json: str) -> bool:
        """Such an item is added."""
        return chunk_json.startswith(_ITEM_ADDED) and any(call in chunk_json for call in _CALL_ITEMS)

    def ended(self, chunks: Sequence[Chunk]) -> Ended:
        """The last event holds the whole response."""
        response = orjson.loads(chunks[-1].to_json())["response"]
        reasoning_tokens = int(response["usage"]["output_tokens_details"]["reasoning_tokens"])
        if response["status"] == "incomplete":
            return Ended(sampling_pb2.FINISH_REASON_LENGTH, reasoning_tokens)
        has_call = any(item["type"] in ("function_call", "custom_tool_call") for item in response["output"])
        reason = sampling_pb2.FINISH_REASON_TOOL_CALLS if has_call else sampling_pb2.FINISH_REASON_STOP
        return Ended(reason, reasoning_tokens)
