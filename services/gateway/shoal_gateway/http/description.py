"""GET /openapi.json."""

from __future__ import annotations

import orjson

from shoal_gateway.http.exchange import Exchange
from shoal_gateway.openapi.document import document


class Description:
    """The document, made once."""

    def __init__(self) -> None:
        self._body = orjson.dumps(document())

    async def get(self, exchange: Exchange) -> None:
        """All of it."""
        await exchange.respond(200, self._body)
