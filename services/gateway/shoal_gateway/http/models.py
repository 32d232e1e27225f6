"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import orjson

from shoal_gateway.http.exchange import Exchange
from shoal_gateway.served_model import ServedModel


class Models:
    """What requests may name, as OpenAI lists it; the aliases beside the one real name."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def list_all(self, exchange: Exchange) -> None:
        """All names."""
        names = sorted((self._model.name, *self._model.aliases))
        await exchange.respond(200, orjson.dumps({"object": "list", "data": [self._object(name) for name in names]}))

    async def get(self, exchange: Exchange) -> None:
        """One name. Raises ModelNotFound."""
        name = exchange.path.rpartition("/models/")[2]
        self._model.check_name(name)
        await exchange.respond(200, orjson.dumps(self._object(name)))

    def _object(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "shoal",
            "max_model_len": self._model.max_context_tokens,
        }
