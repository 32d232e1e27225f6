"""The bytes of Anthropic Messages: the recipe's events and messages, with exact usage and our extension. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from deepseek_recipe import MessagesResponse, Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.http.errors import anthropic_error
from shoal_gateway.http.forms.events import event
from shoal_gateway.http.positions import prompt_report
from shoal_gateway.journal import UNFINISHED
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.output_shape import Chunk

_STOP = event("message_stop", '{"type":"message_stop"}')


def usage_object(usage: sampling_pb2.Usage) -> dict[str, Any]:
    """Usage as Anthropic counts it: what was read from the cache is not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


class MessagesForm:
    """One answer.

    extension   what `shoal` says of the answer: in `message_start`, or in the whole message
    """

    keep_alive = event("ping", '{"type":"ping"}')

    def __init__(self, *, extension: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._extension, self._tokenizer = dict(extension), tokenizer
        self._whole = MessagesResponse("", "", 0, 0, 0)
        self._has_begun = False
        self._last = b""

    def events(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The recipe's events; message_delta and message_stop wait for the usage."""
        events: list[bytes] = []
        for output in outputs:
            self._extension |= prompt_report(output, self._tokenizer)
            chunks = output.chunks
            if output.finish_reason != UNFINISHED:
                self._last = chunks[-2].to_json().encode()
                chunks = chunks[:-2]
            events.append(self.pieces(output.choice_index, chunks))
        return b"".join(events)

    def pieces(self, choice_index: int, chunks: Sequence[Chunk]) -> bytes:
        """See `events`."""
        events: list[bytes] = []
        for chunk in chunks:
            name = MessagesResponse.sse_event_name(chunk)  # type: ignore[arg-type]
            raw = chunk.to_json()
            if not self._has_begun:
                self._has_begun = True
                raw = self._extended(raw)
            events.append(event(name or "", raw))
        return b"".join(events)

    def end(self, usage: sampling_pb2.Usage) -> bytes:
        """The stop reason with exact usage, and the end."""
        last = orjson.loads(self._last)
        last["usage"] = usage_object(usage)
        return event("message_delta", orjson.dumps(last).decode()) + _STOP

    def error(self, error: MeshError) -> bytes:
        """The stream ends with it, without message_stop."""
        return event("error", orjson.dumps(anthropic_error(error)).decode())

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """More of a whole message. Uses the chunks up."""
        for output in outputs:
            self._extension |= prompt_report(output, self._tokenizer)
            for chunk in output.chunks:
                self._whole.accumulate(chunk)  # type: ignore[arg-type]

    def body(self, usage: sampling_pb2.Usage) -> bytes:
        """The finished message."""
        message = orjson.loads(self._whole.to_json())
        return orjson.dumps({**message, "usage": usage_object(usage), "shoal": self._extension})

    def _extended(self, raw: str) -> str:
        start = orjson.loads(raw)
        start["message"]["shoal"] = self._extension
        return orjson.dumps(start).decode()
