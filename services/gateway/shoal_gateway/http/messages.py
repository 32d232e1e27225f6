"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

from typing import Any

import orjson

from shoal_gateway.answer import Answer
from shoal_gateway.dialect import MESSAGES_DIALECT
from shoal_gateway.encode import Encoder
from shoal_gateway.http.exchange import Exchange
from shoal_gateway.http.form import PreparedAnswer
from shoal_gateway.http.forms.messages import MessagesForm
from shoal_gateway.sampling import applied


class Messages:
    """Prepares messages for the endpoint, and counts their tokens."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def prepare(self, body: dict[str, Any], size_bytes: int) -> PreparedAnswer:
        """Raises InvalidArgument."""
        prepared = await self._encoder.chat(body, size_bytes, MESSAGES_DIALECT)
        request = prepared.request

        def form(answer: Answer) -> MessagesForm:
            extension = {"seed": request.params.seed, "applied": applied(request.params)}
            return MessagesForm(extension=extension, tokenizer=self._encoder.tokenizer)

        return PreparedAnswer(request=request, is_stream=prepared.is_stream, form=form)

    async def count_tokens(self, exchange: Exchange) -> None:
        """The prompt's tokens; nothing is generated."""
        body, size_bytes = await exchange.json_object()
        count = await self._encoder.count_tokens(body, size_bytes, MESSAGES_DIALECT)
        await exchange.respond(200, orjson.dumps({"input_tokens": count}))
