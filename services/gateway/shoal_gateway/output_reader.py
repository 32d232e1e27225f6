"""From entries as they arrive to what an API shape writes: text parsed, stops found, batched per choice. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepseek_recipe import Tokenizer
from shoal.common.v1 import tokens_pb2

from shoal_gateway.journal import UNFINISHED, FinishReason
from shoal_gateway.output_shape import Chunk
from shoal_gateway.text import ChoiceText, OutputRecipe


@dataclass(slots=True)
class ChoiceOutput:
    """What came of one choice since the last batch."""

    choice_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tokens_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tokens_pb2.PositionLogprobs] = field(default_factory=list)
    """In the first output of choice 0 if asked for: one per prompt token after the first."""
    chunks: list[Chunk] = field(default_factory=list)
    """Parsed text, in order; empty where only tokens are wanted. The last one holds the finish reason."""
    finish_reason: FinishReason = UNFINISHED


class _Arrived:
    __slots__ = ("choice_index", "finish_reason", "logprobs", "prompt_logprobs", "token_ids")

    def __init__(
        self,
        choice_index: int,
        token_ids: list[int],
        logprobs: Sequence[tokens_pb2.PositionLogprobs],
        finish_reason: FinishReason,
        prompt_logprobs: Sequence[tokens_pb2.PositionLogprobs],
    ) -> None:
        self.choice_index, self.token_ids, self.finish_reason = choice_index, token_ids, finish_reason
        self.logprobs, self.prompt_logprobs = logprobs, prompt_logprobs


class OutputReader:
    """Output of all choices of one answer. Invariant: nothing comes of a choice after its finish reason.

    `cached_tokens` of the prompt is to be set before the first output is read.
    """

    def __init__(
        self,
        choice_count: int,
        recipe: OutputRecipe | None,
        tokenizer: Tokenizer,
        *,
        request_id: str = "",
        prompt_tokens: int = 0,
    ) -> None:
        self._texts = [ChoiceText(recipe, tokenizer, request_id) for _ in range(choice_count)] if recipe else []
        self._prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._has_begun = [False] * choice_count
        self._counts = [0] * choice_count
        self._finished = [False] * choice_count
        self._arrived: list[_Arrived] = []

    @property
    def is_finished(self) -> bool:
        """All choices have ended and been read."""
        return all(self._finished)

    @property
    def has_arrived(self) -> bool:
        """There is something to read."""
        return bool(self._arrived)

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that belong to the reasoning, of the choices that have ended."""
        return sum(text.reasoning_tokens for text in self._texts)

    def count(self, choice_index: int) -> int:
        """Output tokens of one choice read so far."""
        return self._counts[choice_index]

    @property
    def counts(self) -> list[int]:
        """Output tokens read so far, per choice."""
        return list(self._counts)

    def add(
        self,
        choice_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[tokens_pb2.PositionLogprobs],
        finish_reason: FinishReason,
        prompt_logprobs: Sequence[tokens_pb2.PositionLogprobs] = (),
    ) -> None:
        """More of one choice, without gaps or repetitions."""
        if self._arrived and not logprobs and not prompt_logprobs:
            # What a reader that is behind finds as one push costs little more than one token.
            last = self._arrived[-1]
            if last.choice_index == choice_index and last.finish_reason == UNFINISHED and not last.logprobs:
                last.token_ids += token_ids
                last.finish_reason = finish_reason
                return
        self._arrived.append(_Arrived(choice_index, list(token_ids), logprobs, finish_reason, prompt_logprobs))

    def plain(self, choice_index: int, token_ids: list[int]) -> list[Chunk] | None:
        """What `add` and `read` would give for tokens of a choice that goes on, where nothing else is to be read.

        None, and nothing is taken, where something is, and where the choice may end or has not begun.
        """
        if self._arrived or not self._texts or self._finished[choice_index] or not self._has_begun[choice_index]:
            return None
        chunks = self._texts[choice_index].plain(token_ids)
        if chunks is not None:
            self._counts[choice_index] += len(token_ids)
        return chunks

    def read(self) -> tuple[list[ChoiceOutput], list[tuple[int, int]]]:
        """What came since the last call, and the choices that ended by their text: (choice index, tokens kept)."""
        arrived, self._arrived = self._arrived, []
        outputs: dict[int, ChoiceOutput] = {}
        ends: list[tuple[int, int]] = []
        for one in arrived:
            if self._finished[one.choice_index]:
                continue
            output = outputs.get(one.choice_index)
            if output is None:
                output = outputs[one.choice_index] = ChoiceOutput(one.choice_index)
            kept = self._take(one, output)
            if kept is not None:
                ends.append((one.choice_index, kept))
        return list(outputs.values()), ends

    def _take(self, one: _Arrived, output: ChoiceOutput) -> int | None:
        """Returns the tokens kept of the choice if its text ended."""
        index = one.choice_index
        kept, has_ended = len(one.token_ids), False
        if self._texts:
            text = self._texts[index]
            if not self._has_begun[index]:
                self._has_begun[index] = True
                output.chunks += text.begin(self._prompt_tokens, self.cached_tokens)
            progress = text.push(one.token_ids, one.logprobs)
            output.chunks += progress.chunks
            kept, has_ended = progress.kept_count, progress.has_ended
            if not has_ended and one.finish_reason != UNFINISHED:
                output.chunks += text.finish(one.finish_reason)
        if one.prompt_logprobs:
            output.prompt_logprobs += one.prompt_logprobs
        output.token_ids += one.token_ids[:kept]
        if one.logprobs:
            output.logprobs += one.logprobs[:kept]
        self._counts[index] += kept
        if has_ended:
            output.finish_reason = self._texts[index].end_reason
        else:
            output.finish_reason = one.finish_reason
        self._finished[index] = output.finish_reason != UNFINISHED
        return self._counts[index] if has_ended else None
