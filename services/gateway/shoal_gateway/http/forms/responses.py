"""The bytes of Responses: the recipe's events and responses, with exact usage and our extension. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from deepseek_recipe import ResponsesResponse, Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.http.errors import openai_error
from shoal_gateway.http.forms.events import event
from shoal_gateway.http.positions import prompt_report
from shoal_gateway.journal import UNFINISHED
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.output_shape import Chunk

_WITH_RESPONSE = ("response.created", "response.in_progress")
_ITEM_DONE = "response.output_item.done"


def usage_object(usage: sampling_pb2.Usage) -> dict[str, Any]:
    """Usage as OpenAI reports it here."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesForm:
    """One answer.

    opening     makes the JSON of response.created, for an answer that fails before it has begun
    echoed      what response objects repeat of the request beyond what the recipe does
    extension   what `shoal` of response objects says of the answer
    """

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        *,
        opening: Callable[[], str],
        echoed: Mapping[str, Any],
        extension: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        self._opening, self._echoed, self._tokenizer = opening, echoed, tokenizer
        self._extension = dict(extension)
        self._whole = ResponsesResponse("", "", 0, 0, 0)
        self._sequence_number = 0
        self._created = ""
        self._items: list[str] = []
        self._last = ""

    def events(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The recipe's events; the last one waits for the usage."""
        events: list[bytes] = []
        for output in outputs:
            self._extension |= prompt_report(output, self._tokenizer)
            chunks = output.chunks
            if output.finish_reason != UNFINISHED:
                self._last = chunks[-1].to_json()
                chunks = chunks[:-1]
            events.append(self.pieces(output.choice_index, chunks))
        return b"".join(events)

    def pieces(self, choice_index: int, chunks: Sequence[Chunk]) -> bytes:
        """See `events`."""
        events: list[bytes] = []
        for chunk in chunks:
            name = ResponsesResponse.sse_event_name(chunk) or ""  # type: ignore[arg-type]
            raw = chunk.to_json()
            if name in _WITH_RESPONSE:
                self._created = raw
                raw = self._extended(raw)
            elif name == _ITEM_DONE:
                self._items.append(raw)
            events.append(event(name, raw))
        self._sequence_number += len(chunks)
        return b"".join(events)

    def end(self, usage: sampling_pb2.Usage) -> bytes:
        """response.completed or response.incomplete with exact usage."""
        last = orjson.loads(self._last)
        self._complete(last["response"])["usage"] = usage_object(usage)
        return event(last["type"], orjson.dumps(last).decode())

    def error(self, error: MeshError) -> bytes:
        """response.failed, with the items that were complete."""
        failed = orjson.loads(self._created or self._opening())
        told = openai_error(error)["error"]
        failed["type"], failed["sequence_number"] = "response.failed", self._sequence_number
        response = self._complete(failed["response"])
        response["status"] = "failed"
        response["error"] = {"code": told["code"], "message": told["message"]}
        response["output"] = [orjson.loads(item)["item"] for item in self._items]
        return event("response.failed", orjson.dumps(failed).decode())

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """More of a whole response. Uses the chunks up."""
        for output in outputs:
            self._extension |= prompt_report(output, self._tokenizer)
            for chunk in output.chunks:
                self._whole.accumulate(chunk)  # type: ignore[arg-type]

    def body(self, usage: sampling_pb2.Usage) -> bytes:
        """The finished response."""
        response = self._complete(orjson.loads(self._whole.to_json()))
        return orjson.dumps({**response, "usage": usage_object(usage)})

    def _extended(self, raw: str) -> str:
        made = orjson.loads(raw)
        self._complete(made["response"])
        return orjson.dumps(made).decode()

    def _complete(self, response: dict[str, Any]) -> dict[str, Any]:
        response |= {**self._echoed, "shoal": self._extension}
        return response
