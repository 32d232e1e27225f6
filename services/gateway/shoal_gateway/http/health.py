"""GET /healthz and /readyz on the public port; the admin port has its own."""

from __future__ import annotations

import orjson
from shoal_common.rpc import Readiness

from shoal_gateway.http.exchange import Exchange


class Health:
    """Alive: the process answers. Ready: a request sent now would be served."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def alive(self, exchange: Exchange) -> None:
        """200 while the process runs."""
        await exchange.respond(200, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """200, or 503 with what is missing."""
        missing = self._readiness.missing
        body = orjson.dumps({"ready": not missing, "missing": list(missing)})
        await exchange.respond(503 if missing else 200, body)
