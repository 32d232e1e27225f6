"""The bytes of Chat Completions: chunks of a stream and whole answers, from what the recipe parsed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from deepseek_recipe import ChatCompletionResponse, Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.http.errors import openai_error
from shoal_gateway.http.positions import prompt_report
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.output_shape import Chunk

_CHOICE = '"choices":[{"index":0,'
_USAGE = '}],"usage":'
_DONE = b"data: [DONE]\n\n"
# The recipe leaves `content` out where all is reasoning; clients of OpenAI's shape look for it. In the model's own text
# the quotes would be escaped.
_REASONING_ONLY = '"logprobs":{"reasoning_content":'
_WITH_CONTENT = '"logprobs":{"content":null,"reasoning_content":'


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


class ChatForm:
    """One answer.

    Streamed, its events have the same id, model and created in each. The recipe's own JSON is spliced, not parsed:
    between its first choice and its usage nothing has to change. Whole, the recipe accumulates the same chunks.

    extension   what `shoal` says of the answer
    """

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        choice_count: int,
        extension: Mapping[str, Any],
        include_usage: bool,
        is_thinking: bool,
        tokenizer: Tokenizer,
    ) -> None:
        self._answer_id, self._model, self._created_s = answer_id, model, created_s
        self._include_usage, self._is_thinking, self._tokenizer = include_usage, is_thinking, tokenizer
        self._values = dict(extension)
        self._choices = [ChatCompletionResponse("", "", 0, 0, 0) for _ in range(choice_count)]
        head = {**self._shared("chat.completion.chunk"), "choices": []}
        self._head = "data: " + orjson.dumps(head).decode()[: -len("]}")]
        self._extension = self._once = self._extended()
        self._at = 0

    def events(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """Events for a batch, the first one of the answer with the `shoal` extension."""
        events: list[str] = []
        for output in outputs:
            if report := prompt_report(output, self._tokenizer):
                self._once = self._extended(report)
            for chunk in output.chunks:
                event = self._event(output.choice_index, chunk)
                events.append(event.replace(_REASONING_ONLY, _WITH_CONTENT, 1) if output.logprobs else event)
        return "".join(events).encode()

    def pieces(self, choice_index: int, chunks: Sequence[Chunk]) -> bytes:
        """See `events`."""
        if len(chunks) == 1:
            return self._event(choice_index, chunks[0]).encode()
        return "".join([self._event(choice_index, chunk) for chunk in chunks]).encode()

    def end(self, usage: sampling_pb2.Usage) -> bytes:
        """Usage for those who asked for it, and [DONE]."""
        if not self._include_usage:
            return _DONE
        counts = orjson.dumps(usage_object(usage, is_thinking=self._is_thinking)).decode()
        return f'{self._head}],"usage":{counts}{self._extension}}}\n\n'.encode() + _DONE

    def error(self, error: MeshError) -> bytes:
        """The stream ends with it, without [DONE]."""
        return b"data: " + orjson.dumps(openai_error(error)) + b"\n\n"

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """More of a whole answer. Uses the chunks up."""
        for output in outputs:
            self._values |= prompt_report(output, self._tokenizer)
            accumulated = self._choices[output.choice_index]
            for chunk in output.chunks:
                accumulated.accumulate(chunk)  # type: ignore[arg-type]

    def body(self, usage: sampling_pb2.Usage) -> bytes:
        """The finished answer."""
        choices = []
        for index, accumulated in enumerate(self._choices):
            choice = orjson.loads(accumulated.to_json())["choices"][0]
            choice["index"] = index
            if choice["logprobs"] is not None:
                choice["logprobs"].setdefault("content", None)
            choices.append(choice)
        counts = usage_object(usage, is_thinking=self._is_thinking)
        whole = {**self._shared("chat.completion"), "choices": choices, "usage": counts, "shoal": self._values}
        return orjson.dumps(whole)

    def _event(self, choice_index: int, chunk: Chunk) -> str:
        raw = chunk.to_json()
        if not self._at:
            # The same in every chunk: the recipe got an empty id and name, and its times have ten digits.
            self._at = raw.index(_CHOICE) + len(_CHOICE)
        middle = raw[self._at : raw.rindex(_USAGE)]
        extension, self._once = self._once, ""
        return f'{self._head}{{"index":{choice_index},{middle}}}],"usage":null{extension}}}\n\n'

    def _shared(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._answer_id,
            "object": kind,
            "created": self._created_s,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _extended(self, values: Mapping[str, Any] | None = None) -> str:
        return ',"shoal":' + orjson.dumps({**self._values, **(values or {})}).decode()
