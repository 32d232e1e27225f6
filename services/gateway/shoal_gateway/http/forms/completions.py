"""The bytes of completions: chunks of a stream and whole answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from deepseek_recipe import Tokenizer
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError

from shoal_gateway.echo import Echo
from shoal_gateway.http.errors import openai_error
from shoal_gateway.http.forms.chat import usage_object
from shoal_gateway.http.forms.token_spellings import OldLogprobs, parsed_positions, prompt_positions
from shoal_gateway.http.positions import prompt_report
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.output_shape import Chunk

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Piece:
    """A part of a choice's text, or all of it."""

    text: str = ""
    logprobs: OldLogprobs | None = None
    finish_reason: str | None = None

    def extend(self, other: _Piece) -> None:
        self.text += other.text
        if self.logprobs is not None and other.logprobs is not None:
            self.logprobs.extend(other.logprobs)
        self.finish_reason = other.finish_reason or self.finish_reason

    def choice(self, index: int) -> dict[str, Any]:
        """The choice object of the protocol."""
        logprobs = None if self.logprobs is None else self.logprobs.as_json()
        return {"text": self.text, "index": index, "logprobs": logprobs, "finish_reason": self.finish_reason}


class CompletionForm:
    """One answer. Choices of prompt p are those from p * n on.

    echoes             one per prompt, or none where prompts are not repeated
    has_echo_logprobs  what is repeated comes with its log-probabilities
    extension          what `shoal` says of the answer
    """

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        choice_count: int,
        prompt_count: int,
        echoes: Sequence[Echo],
        has_logprobs: bool,
        has_echo_logprobs: bool,
        extension: Mapping[str, Any],
        include_usage: bool,
        tokenizer: Tokenizer,
    ) -> None:
        self._head = {"id": answer_id, "object": "text_completion", "created": created_s, "model": model}
        self._head["system_fingerprint"] = None
        self._per_prompt, self._echoes = choice_count, echoes
        self._has_logprobs, self._has_echo_logprobs = has_logprobs, has_echo_logprobs
        self._extension = dict(extension)
        self._include_usage, self._tokenizer = include_usage, tokenizer
        total = choice_count * prompt_count
        self._whole = [self._piece() for _ in range(total)]
        self._lengths = [0] * total
        self._has_begun = [not echoes] * total
        self._prompt_logprobs: dict[int, OldLogprobs] = {}
        self._withheld: dict[int, list[ChoiceOutput]] = {}
        self._is_first = True

    def events(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """One event per choice of a batch that says anything, the first of the answer with the `shoal` extension."""
        events = []
        for index, piece in self._pieces(outputs):
            if piece.text or piece.finish_reason or (piece.logprobs is not None and piece.logprobs.tokens):
                events.append(self._event([piece.choice(index)], None, has_extension=self._is_first))
                self._is_first = False
        return b"".join(events)

    def pieces(self, choice_index: int, chunks: Sequence[Chunk]) -> bytes:
        """See `events`."""
        return self.events([ChoiceOutput(choice_index, chunks=list(chunks))])

    def end(self, usage: sampling_pb2.Usage) -> bytes:
        """Usage for those who asked for it, and the last line."""
        if not self._include_usage:
            return _DONE
        return self._event([], usage_object(usage, is_thinking=False), has_extension=True) + _DONE

    def error(self, error: MeshError) -> bytes:
        """The stream ends with it, without [DONE]."""
        return b"data: " + orjson.dumps(openai_error(error)) + b"\n\n"

    def add(self, outputs: Sequence[ChoiceOutput]) -> None:
        """A batch of a whole answer."""
        for index, piece in self._pieces(outputs):
            self._whole[index].extend(piece)

    def body(self, usage: sampling_pb2.Usage) -> bytes:
        """The whole answer."""
        choices = [piece.choice(index) for index, piece in enumerate(self._whole)]
        told = {"choices": choices, "usage": usage_object(usage, is_thinking=False), "shoal": self._extension}
        return orjson.dumps({**self._head, **told})

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, has_extension: bool) -> bytes:
        told: dict[str, Any] = {**self._head, "choices": choices, "usage": usage}
        if has_extension:
            told["shoal"] = self._extension
        return b"data: " + orjson.dumps(told) + b"\n\n"

    def _pieces(self, outputs: Sequence[ChoiceOutput]) -> list[tuple[int, _Piece]]:
        pieces = []
        for output in outputs:
            for ready in self._ready(output):
                pieces.append((ready.choice_index, self._take(ready)))
        return pieces

    def _ready(self, output: ChoiceOutput) -> list[ChoiceOutput]:
        """What can be written now: nothing of a prompt's choices before its own log-probabilities, if they are due."""
        if not self._has_echo_logprobs:
            if report := prompt_report(output, self._tokenizer):
                self._extension |= report
                self._is_first = True
            return [output]
        prompt = output.choice_index // self._per_prompt
        is_told = prompt in self._prompt_logprobs
        if not is_told and output.choice_index % self._per_prompt == 0:
            echo = self._echoes[prompt]
            positions = prompt_positions(echo.prompt_ids, output.prompt_logprobs, echo.first, self._tokenizer)
            self._prompt_logprobs[prompt] = OldLogprobs()
            self._prompt_logprobs[prompt].add(positions, 0)
            return [output, *self._withheld.pop(prompt, ())]
        if is_told:
            return [output]
        self._withheld.setdefault(prompt, []).append(output)
        return []

    def _take(self, output: ChoiceOutput) -> _Piece:
        index = output.choice_index
        piece = self._piece()
        if not self._has_begun[index]:
            self._has_begun[index] = True
            prompt = index // self._per_prompt
            piece.text = self._echoes[prompt].text
            if piece.logprobs is not None:
                piece.logprobs.extend(self._prompt_logprobs[prompt])
        for chunk in output.chunks:
            choice = orjson.loads(chunk.to_json())["choices"][0]
            if piece.logprobs is not None:
                piece.logprobs.add(parsed_positions(choice["logprobs"]), self._lengths[index] + len(piece.text))
            piece.text += choice["delta"].get("content") or ""
            piece.finish_reason = choice["finish_reason"]
        self._lengths[index] += len(piece.text)
        return piece

    def _piece(self) -> _Piece:
        return _Piece(logprobs=OldLogprobs() if self._has_logprobs else None)
