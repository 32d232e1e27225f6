"""POST /tokenize and /detokenize: the model's own view of text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from shoal_common.errors import InvalidArgument

from shoal_gateway.chat_fields import read_chat_fields, recipe_body
from shoal_gateway.encode import LARGE_BODY_BYTES, Encoder
from shoal_gateway.fields import Fields
from shoal_gateway.http.exchange import Exchange
from shoal_gateway.http.forms.token_spellings import spelled, token_bytes
from shoal_gateway.text import detokenize

T = TypeVar("T")
MAX_TEXT_BYTES = 16 * 1024 * 1024


class Tokens:
    """Both endpoints. Nothing is generated."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def tokenize(self, exchange: Exchange) -> None:
        """`prompt` (begin-of-sequence in front unless add_special_tokens is false) or `messages`, as token ids."""
        body, size_bytes = await exchange.json_object()
        await exchange.respond(200, await _run(lambda: self._tokenized(body), size_bytes))

    async def detokenize(self, exchange: Exchange) -> None:
        """`tokens` as text, special tokens spelled out."""
        body, size_bytes = await exchange.json_object()
        await exchange.respond(200, await _run(lambda: self._detokenized(body), size_bytes))

    def _tokenized(self, body: dict[str, Any]) -> bytes:
        fields = self._fields(body)
        ids = self._ids(body, fields)
        has_strings = fields.boolean("return_token_strs") or False
        answer = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self._encoder.context_tokens,
            "token_strs": self._strings(ids) if has_strings else None,
        }
        return orjson.dumps(answer)

    def _ids(self, body: dict[str, Any], fields: Fields) -> list[int]:
        if body.get("messages") is not None:
            chat = {**body, "model": self._encoder.model.name}
            read = read_chat_fields(chat, self._encoder.model.vocab_size)
            return self._encoder.conversation(recipe_body(chat, read), read.effort_number).prompt_ids
        text = fields.text("prompt", MAX_TEXT_BYTES)
        if text is None:
            raise InvalidArgument.at("prompt", "is required, or messages")
        has_begin = fields.boolean("add_special_tokens")
        ids = self._encoder.raw_text(text)
        return ids if has_begin is False else [self._encoder.model.bos_id, *ids]

    def _strings(self, ids: Sequence[int]) -> list[str]:
        raw = token_bytes(list(dict.fromkeys(ids)), self._encoder.tokenizer)
        return [spelled(raw[one]) for one in ids]

    def _detokenized(self, body: dict[str, Any]) -> bytes:
        model = self._encoder.model
        ids = self._fields(body).token_ids("tokens", model.vocab_size, model.max_context_tokens)
        if ids is None:
            raise InvalidArgument.at("tokens", "is required")
        return orjson.dumps({"prompt": detokenize(ids, self._encoder.tokenizer)})

    def _fields(self, body: dict[str, Any]) -> Fields:
        fields = Fields(body)
        self._encoder.model.check_name(fields.text("model", 256) or self._encoder.model.name)
        return fields


async def _run(call: Callable[[], T], size_bytes: int) -> T:
    """On a thread where the body is large."""
    return call() if size_bytes < LARGE_BODY_BYTES else await asyncio.to_thread(call)
