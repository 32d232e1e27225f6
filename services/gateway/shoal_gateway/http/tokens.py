"""POST /tokenize and /detokenize: the model's own view of text."""

from __future__ import annotations

import orjson
from shoal_common.errors import InvalidArgument

from shoal_gateway.encode import Encoder
from shoal_gateway.fields import Fields
from shoal_gateway.http.exchange import Exchange
from shoal_gateway.text import detokenize

_MAX_TEXT_BYTES = 16 * 1024 * 1024


class Tokens:
    """Both endpoints. Nothing is generated."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def tokenize(self, exchange: Exchange) -> None:
        """`prompt` (begin-of-sequence in front unless add_special_tokens is false) or `messages`, as token ids."""
        body, size_bytes = await exchange.json_object()
        fields = Fields(body)
        model = self._encoder.model
        model.check_name(fields.text("model", 256) or model.name)
        if body.get("messages") is not None:
            prepared = await self._encoder.chat({**body, "model": model.name}, size_bytes)
            ids = prepared.request.prompt_ids
        else:
            text = fields.text("prompt", _MAX_TEXT_BYTES)
            if text is None:
                raise InvalidArgument.at("prompt", "is required, or messages")
            has_begin = fields.boolean("add_special_tokens")
            ids = [model.bos_id] if has_begin is None or has_begin else []
            ids += self._encoder.raw_text(text)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self._encoder.context_tokens}
        await exchange.respond(200, orjson.dumps(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """`tokens` as text, special tokens spelled out."""
        body, _ = await exchange.json_object()
        fields = Fields(body)
        model = self._encoder.model
        model.check_name(fields.text("model", 256) or model.name)
        ids = fields.token_ids("tokens", model.vocab_size, 4 * model.max_context_tokens)
        if ids is None:
            raise InvalidArgument.at("tokens", "is required")
        await exchange.respond(200, orjson.dumps({"prompt": detokenize(ids, self._encoder.tokenizer)}))
