"""The bytes of Chat Completions: chunks of a stream and whole answers, from what the recipe parsed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from deepseek_recipe import ChatCompletionChunk, ChatCompletionResponse
from shoal.common.v1 import sampling_pb2

_CHOICE = '"choices":[{"index":0,'
_USAGE = '}],"usage":'
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def usage_object(usage: sampling_pb2.Usage, *, is_thinking: bool) -> dict[str, Any]:
    """Usage as the hosted API reports it: cache hits and misses add up to the prompt. Ours is what drafts did."""
    hits = usage.cached_prompt_tokens
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": hits},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens if is_thinking else 0},
        "prompt_cache_hit_tokens": hits,
        "prompt_cache_miss_tokens": usage.prompt_tokens - hits,
        "shoal": {
            "decode_steps": usage.decode_step_count,
            "drafted_by_position": list(usage.drafted_by_position),
            "verified_by_position": list(usage.verified_by_position),
            "accepted_by_position": list(usage.accepted_by_position),
        },
    }
    return counts


class ChunkWriter:
    """Events of one streamed answer: same id, model and created in each.

    The recipe's own JSON is spliced, not parsed: between its first choice and its usage nothing has to change.
    """

    def __init__(self, *, answer_id: str, model: str, created_s: int, extension: Mapping[str, Any]) -> None:
        head: dict[str, Any] = {"id": answer_id, "object": "chat.completion.chunk", "created": created_s}
        head |= {"model": model, "system_fingerprint": None}
        self._head = "data: " + orjson.dumps(head).decode()[:-1] + ',"choices":['
        self._values = extension
        self._extension = self._once = ',"shoal":' + orjson.dumps(extension).decode()
        self._at = 0

    def chunks(self, choice_index: int, chunks: Sequence[ChatCompletionChunk]) -> bytes:
        """Events for chunks of one choice, the first one of the answer with the `shoal` extension."""
        events = []
        for chunk in chunks:
            raw = chunk.to_json()
            if not self._at:
                # The same in every chunk: the recipe got an empty id and name, and its times have ten digits.
                self._at = raw.index(_CHOICE) + len(_CHOICE)
            middle = raw[self._at : raw.rindex(_USAGE)]
            extension, self._once = self._once, ""
            events.append(f'{self._head}{{"index":{choice_index},{middle}}}],"usage":null{extension}}}\n\n')
        return "".join(events).encode()

    def extend(self, values: Mapping[str, Any]) -> None:
        """The next event carries the extension with these values too."""
        self._once = ',"shoal":' + orjson.dumps({**self._values, **values}).decode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The event after the last choice, for those who asked for it."""
        return f'{self._head}],"usage":{orjson.dumps(usage).decode()}{self._extension}}}\n\n'.encode()


def error_event(body: bytes) -> bytes:
    """An error after the first byte; the stream ends with it, without [DONE]."""
    return b"data: " + body + b"\n\n"


class WholeAnswer:
    """One answer in one body, accumulated by the recipe from the same chunks that a stream would carry."""

    def __init__(self, choice_count: int) -> None:
        self._choices = [ChatCompletionResponse("", "", 0, 0, 0) for _ in range(choice_count)]

    def add(self, choice_index: int, chunks: Sequence[ChatCompletionChunk]) -> None:
        """More of one choice."""
        for chunk in chunks:
            self._choices[choice_index].accumulate(chunk)

    def body(
        self, *, answer_id: str, model: str, created_s: int, usage: Mapping[str, Any], extension: Mapping[str, Any]
    ) -> bytes:
        """The body of a finished answer."""
        choices = []
        for index, accumulated in enumerate(self._choices):
            choice = orjson.loads(accumulated.to_json())["choices"][0]
            choice["index"] = index
            choices.append(choice)
        return orjson.dumps(
            {
                "id": answer_id,
                "object": "chat.completion",
                "created": created_s,
                "model": model,
                "system_fingerprint": None,
                "choices": choices,
                "usage": usage,
                "shoal": extension,
            }
        )
