"""From output tokens to text: detokenised, parsed into reasoning, content and tool calls, ended at stop strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from deepseek_recipe import (
    Conversation,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    ModelVersion,
    ParsingOptions,
    PromptUsage,
    SpecialToken,
    SpecialTokens,
    StreamProcessor,
    Tokenizer,
)
from shoal.common.v1 import sampling_pb2, tokens_pb2

from shoal_gateway.journal import FinishReason
from shoal_gateway.output_shape import CHAT, Chunk, OutputShape

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_NEVER = "\ue000\ue001shoal\ue002"
"""Private-use characters: the parser drops the end of a thought even where none is expected, so it gets no name."""
_CALLS_END = "</{dsml} calls>"
_REASONS = {sampling_pb2.FINISH_REASON_LENGTH: InferenceFinishReason.Length}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRecipe:
    """How the output of a request becomes text: what the converter said, and which tokens are no text."""

    converted: ConversationRequest
    parsing: ParsingOptions
    has_tools: bool
    hidden_ids: frozenset[int]
    """The end-of-sequence token and the stop tokens: they end a choice or, with ignore_eos, mean nothing."""
    shape: OutputShape = CHAT
    """Of which API the chunks are."""


def plain_recipe(stop: Sequence[str], hidden_ids: frozenset[int]) -> OutputRecipe:
    """Text as it stands: no reasoning, no tool calls."""
    return OutputRecipe(
        converted=ConversationRequest(Conversation(thinking_mode=False), ModelVersion.DeepseekV41Flash),
        parsing=ParsingOptions(
            parse_tool_calls=False, stop_sequences=list(stop), special_tokens=SpecialTokens(thinking_end=_NEVER)
        ),
        has_tools=False,
        hidden_ids=hidden_ids,
    )


def detokenize(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of any token ids, special tokens spelled out; bytes of an unfinished last character are left out."""
    text = ChoiceText(plain_recipe([], frozenset()), tokenizer)
    chunks = text.begin() + text.push(token_ids, []).chunks + text.finish(sampling_pb2.FINISH_REASON_STOP)
    return "".join(_content(chunk) for chunk in chunks)


@dataclass(slots=True)
class Progress:
    """What some tokens became."""

    chunks: list[Chunk] = field(default_factory=list)
    kept_count: int = 0
    """Leading tokens of those pushed that belong to the output."""
    has_ended: bool = False
    """The text ended by itself after them: a stop string, or a complete set of tool calls."""


class ChoiceText:
    """The text of one choice. Same text however the tokens are split into pushes; tokens after the end are refused.

    Where a stop or the end of the tool calls may lie between any two tokens, and where each has log-probabilities, the
    recipe gets one at a time. Else it gets a push as a whole, at a fraction of the cost, unless some token is half a
    character: of several tokens that end so it would hold back all, and drop them with it at a cut-off.
    """

    def __init__(self, recipe: OutputRecipe, tokenizer: Tokenizer, request_id: str = "") -> None:
        self._shape = recipe.shape
        generator = self._shape.generator(recipe.converted, request_id)
        self._processor = StreamProcessor(generator, recipe.parsing, tokenizer)
        self._tokenizer = tokenizer
        self._hidden_ids = recipe.hidden_ids
        self._has_tools = recipe.has_tools
        self._calls = _CallsEnd(recipe.parsing, tokenizer) if recipe.parsing.starts_in_tool_calls else None
        parsing = recipe.parsing
        self._can_end_inside = bool(
            recipe.has_tools or parsing.stop_sequences or parsing.starts_in_tool_calls or parsing.parse_json_output
        )
        self._whole_ids = _whole_ids(tokenizer)
        self.reasoning_tokens = 0
        self.end_reason: FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self._parsing = recipe.parsing

    def begin(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> list[Chunk]:
        """The first chunk, which names the role and may tell of the prompt. Call once, first."""
        usage = PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return self._processor.push(InferenceChunk.ready(prompt_usage=usage))

    def push(self, token_ids: Sequence[int], logprobs: Sequence[tokens_pb2.PositionLogprobs]) -> Progress:
        """Take more tokens; `logprobs` is empty or has one element per token."""
        if not logprobs and not self._can_end_inside:
            return Progress(chunks=self._push_all(token_ids), kept_count=len(token_ids))
        progress = Progress()
        for index, token_id in enumerate(token_ids):
            if token_id not in self._hidden_ids:
                self._push_one(token_id, logprobs[index : index + 1], progress)
            progress.kept_count += 1
            if progress.has_ended:
                break
        return progress

    def plain(self, token_ids: Sequence[int]) -> list[Chunk] | None:
        """What `push` makes of them where all of them are kept for sure; else None, and they are not taken."""
        return None if self._can_end_inside else self._push_all(token_ids)

    def finish(self, reason: FinishReason) -> list[Chunk]:
        """The worker ended the choice: what is still held back, and the chunk with the finish reason."""
        chunks = self._processor.push(InferenceChunk.finish(_REASONS.get(reason, InferenceFinishReason.Stop)))
        chunks += self._processor.finish()
        self._ended(chunks)
        return chunks

    def _push_all(self, token_ids: Sequence[int]) -> list[Chunk]:
        hidden = self._hidden_ids
        shown = token_ids if hidden.isdisjoint(token_ids) else [one for one in token_ids if one not in hidden]
        if not shown:
            return []
        push = self._processor.push
        if len(shown) == 1 or self._whole_ids.has_all(shown):
            return push(InferenceChunk.tokens(shown))
        return [chunk for one in shown for chunk in push(InferenceChunk.tokens([one]))]

    def _push_one(self, token_id: int, logprobs: Sequence[tokens_pb2.PositionLogprobs], progress: Progress) -> None:
        chunks = self._processor.push(_tokens_chunk([token_id], logprobs))
        progress.chunks += chunks
        if self._processor.finished:
            progress.has_ended = True
            self._ended(progress.chunks)
        elif self._calls is not None:
            if self._calls.completes(token_id):
                progress.chunks += self.finish(sampling_pb2.FINISH_REASON_STOP)
                progress.has_ended = True
        elif self._has_tools and any(self._shape.begins_call(chunk.to_json()) for chunk in chunks):
            self._calls = _CallsEnd(self._parsing, self._tokenizer)

    def _ended(self, chunks: Sequence[Chunk]) -> None:
        end = self._shape.ended(chunks)
        self.reasoning_tokens, self.end_reason = end.reasoning_tokens, end.reason


class _WholeIds:
    """Tokens that are whole characters, found out one by one as they come. Bounded by the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: set[int] = set()
        self._others: set[int] = set()

    def has_all(self, token_ids: Sequence[int]) -> bool:
        """Every one of them is."""
        if self._known.issuperset(token_ids):
            return True
        return all(one in self._known or self._find_out(one) for one in token_ids)

    def _find_out(self, token_id: int) -> bool:
        if token_id in self._others:
            return False
        chunks = _plain_processor(self._tokenizer).push(InferenceChunk.tokens([token_id]))
        text = "".join(_content(chunk) for chunk in chunks)
        is_whole = bool(text) and "\ufffd" not in text
        (self._known if is_whole else self._others).add(token_id)
        return is_whole


@functools.lru_cache(maxsize=4)
def _whole_ids(tokenizer: Tokenizer) -> _WholeIds:
    """What is known of a tokenizer's tokens."""
    return _WholeIds(tokenizer)


class _CallsEnd:
    """Looks for the end of the block of tool calls from its first call on: the parser waits for the model to stop."""

    def __init__(self, parsing: ParsingOptions, tokenizer: Tokenizer) -> None:
        self._tag = _CALLS_END.format(dsml=parsing.special_tokens.token(SpecialToken.Dsml))
        self._processor = _plain_processor(tokenizer)
        self._tail = ""

    def completes(self, token_id: int) -> bool:
        """Take the next token; True if the tag is complete with it."""
        for chunk in self._processor.push(InferenceChunk.tokens([token_id])):
            self._tail += _content(chunk)
        found = self._tag in self._tail
        self._tail = self._tail[-len(self._tag) :]
        return found


def _plain_processor(tokenizer: Tokenizer) -> StreamProcessor:
    plain = plain_recipe([], frozenset())
    processor = StreamProcessor(CHAT.generator(plain.converted, ""), plain.parsing, tokenizer)
    processor.push(InferenceChunk.ready())
    return processor


def _content(chunk: Any) -> str:
    return orjson.loads(chunk.to_json())["choices"][0]["delta"].get("content") or ""


def _tokens_chunk(token_ids: Sequence[int], logprobs: Sequence[tokens_pb2.PositionLogprobs]) -> InferenceChunk:
    if not logprobs:
        return InferenceChunk.tokens(token_ids)
    return InferenceChunk.tokens(token_ids, [_logprob(one) for one in logprobs])


def _logprob(one: tokens_pb2.PositionLogprobs) -> tuple[float, list[tuple[int, float]]]:
    top = [(each.token_id, max(each.logprob, LOWEST_LOGPROB)) for each in one.top]
    return max(one.emitted.logprob, LOWEST_LOGPROB), top
