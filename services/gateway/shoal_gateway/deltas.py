"""From batches of output to the messages of the gRPC interface. Pure."""

from __future__ import annotations

from typing import Any

import orjson
from shoal.inference.v1 import chat_pb2, generation_pb2, inference_service_pb2

from shoal_gateway.journal import UNFINISHED
from shoal_gateway.output_reader import ChoiceOutput


class DeltaWriter:
    """One choice. Tool calls are reported when they are complete: when the next one begins, or the choice ends."""

    def __init__(self, choice_index: int, *, has_tokens: bool) -> None:
        self._choice_index, self._has_tokens = choice_index, has_tokens
        self._open_call: chat_pb2.ToolCall | None = None

    def delta(self, output: ChoiceOutput) -> generation_pb2.ChoiceDelta:
        """The next piece; may be empty where output is held back."""
        made = generation_pb2.ChoiceDelta(choice_index=self._choice_index)
        for chunk in output.chunks:
            delta = orjson.loads(chunk.to_json())["choices"][0]["delta"]
            made.text += delta.get("content") or ""
            made.reasoning_text += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                self._take_call(call, made)
        if output.finish_reason != UNFINISHED:
            self._close_call(made)
        if self._has_tokens and output.token_ids:
            made.tokens.ids.extend(output.token_ids)
        made.logprobs.extend(output.logprobs)
        made.prompt_logprobs.extend(output.prompt_logprobs)
        return made

    def _take_call(self, call: dict[str, Any], made: generation_pb2.ChoiceDelta) -> None:
        function = call["function"]
        if call.get("id"):
            self._close_call(made)
            self._open_call = chat_pb2.ToolCall(id=call["id"], name=function["name"])
        if self._open_call is not None:
            self._open_call.arguments_json += function.get("arguments") or ""

    def _close_call(self, made: generation_pb2.ChoiceDelta) -> None:
        if self._open_call is not None:
            made.tool_calls.append(self._open_call)
            self._open_call = None


def is_empty(delta: generation_pb2.ChoiceDelta) -> bool:
    """Nothing in it but its index."""
    has_text = delta.text or delta.reasoning_text or delta.tool_calls
    return not (has_text or delta.tokens.ids or delta.logprobs or delta.prompt_logprobs)


def collect(whole: inference_service_pb2.GenerateResponse, event: inference_service_pb2.GenerateStreamResponse) -> None:
    """Add one event of a stream to the whole answer."""
    kind = event.WhichOneof("event")
    if kind == "head":
        whole.head.CopyFrom(event.head)
    elif kind == "tail":
        whole.tail.CopyFrom(event.tail)
    elif kind in ("delta", "finish"):
        piece = event.delta if kind == "delta" else event.finish.output
        while len(whole.choices) <= piece.choice_index:
            choice_index = len(whole.choices)
            whole.choices.add().output.choice_index = choice_index
        choice = whole.choices[piece.choice_index]
        _append(choice.output, piece)
        if kind == "finish":
            choice.finish_reason = event.finish.finish_reason


def _append(whole: generation_pb2.ChoiceDelta, piece: generation_pb2.ChoiceDelta) -> None:
    whole.text += piece.text
    whole.reasoning_text += piece.reasoning_text
    whole.tool_calls.extend(piece.tool_calls)
    if piece.HasField("tokens"):
        whole.tokens.ids.extend(piece.tokens.ids)
    whole.logprobs.extend(piece.logprobs)
    whole.prompt_logprobs.extend(piece.prompt_logprobs)
