"""Tokens as the old form of log-probabilities names them, and where in the text they stand. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from deepseek_recipe import (
    ChatCompletionRequest,
    InferenceChunk,
    StreamProcessor,
    Tokenizer,
)
from shoal.common.v1 import tokens_pb2

from shoal_gateway.text import LOWEST_LOGPROB, plain_recipe


@dataclass(frozen=True, slots=True)
class Position:
    """One token of a text, its log-probability and those of the best tokens; None where there is none to tell."""

    raw: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]


@dataclass(slots=True)
class OldLogprobs:
    """The four lists of the old form. `text_offset` counts characters (code points) of the whole text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, positions: Iterable[Position], offset: int) -> None:
        """More tokens; `offset` is where the text of the first of them begins."""
        for one in positions:
            name = spelled(one.raw)
            self.tokens.append(name)
            self.token_logprobs.append(one.logprob)
            self.top_logprobs.append(None if one.logprob is None else _best(name, one.logprob, one.top))
            # Half a character stands where the whole one does.
            is_rest = bool(one.raw) and _is_continuation(one.raw[0])
            self.text_offset.append(offset - 1 if is_rest and offset else offset)
            offset += sum(not _is_continuation(byte) for byte in one.raw)

    def extend(self, other: OldLogprobs) -> None:
        """Take over what comes after."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def as_json(self) -> dict[str, Any]:
        """The object of the protocol."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def spelled(raw: bytes) -> str:
    """The token's text, or `bytes:` and its bytes where it is only a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def parsed_positions(logprobs: Mapping[str, Any] | None) -> list[Position]:
    """What the recipe says beside a piece of text."""
    content = (logprobs or {}).get("content") or ()
    return [
        Position(
            bytes(one["bytes"] or b""),
            one["logprob"],
            [(bytes(top["bytes"] or b""), top["logprob"]) for top in one["top_logprobs"]],
        )
        for one in content
    ]


def prompt_positions(
    prompt_ids: Sequence[int], logprobs: Sequence[tokens_pb2.PositionLogprobs], first: int, tokenizer: Tokenizer
) -> list[Position]:
    """The prompt's tokens from `first` on. `logprobs` has one entry per token after the very first."""
    wanted = dict.fromkeys(prompt_ids)
    for one in logprobs:
        wanted.update(dict.fromkeys(top.token_id for top in one.top))
    raw = token_bytes(list(wanted), tokenizer)
    positions = [Position(raw[prompt_ids[0]], None, ())]
    for one in logprobs:
        top = [(raw[each.token_id], max(each.logprob, LOWEST_LOGPROB)) for each in one.top]
        positions.append(Position(raw[one.emitted.token_id], max(one.emitted.logprob, LOWEST_LOGPROB), top))
    return positions[first:]


def token_bytes(ids: Sequence[int], tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each token writes, alone; special tokens spelled out.

    The recipe tells the bytes of the alternatives of an emitted token, so all are asked for as alternatives of one.
    """
    recipe = plain_recipe([], frozenset())
    processor = StreamProcessor(
        ChatCompletionRequest.chunk_generator(recipe.converted, "", ""), recipe.parsing, tokenizer
    )
    processor.push(InferenceChunk.ready())
    carrier = tokenizer.encode("a")[:1]
    (chunk,) = processor.push(InferenceChunk.tokens(carrier, [(0.0, [(one, 0.0) for one in ids])]))
    (told,) = orjson.loads(chunk.to_json())["choices"][0]["logprobs"]["content"]
    return {one: bytes(top["bytes"] or b"") for one, top in zip(ids, told["top_logprobs"], strict=True)}


def _best(name: str, logprob: float, top: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    """The best tokens by name, the emitted one among them; of two that are written alike the better."""
    best: dict[str, float] = {}
    for raw, value in top:
        best.setdefault(spelled(raw), value)
    best.setdefault(name, logprob)
    return best


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80
