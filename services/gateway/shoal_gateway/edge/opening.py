"""The edge of one process: its objects, and the keys from where the settings say."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from shoal_common.telemetry import Metrics

from shoal_gateway.config import GatewayConfig
from shoal_gateway.edge.edge import Edge
from shoal_gateway.edge.key_file import KeyFile
from shoal_gateway.edge.keys import BadKeys, read_pairs
from shoal_gateway.edge.live import LiveGateways
from shoal_gateway.edge.usage import UsageBook

logger = logging.getLogger(__name__)


class OpenEdge:
    """An edge and what keeps it up to date. `start`, `stop`.

    Raises BadKeys, which names the setting, if there are keys that cannot be used.
    """

    def __init__(self, config: GatewayConfig, *, instance_id: str, cache_secret: str, metrics: Metrics) -> None:
        if config.asks_for_keys and not cache_secret:
            raise BadKeys("SHOAL_CACHE_SECRET must be set where API keys are on: it keeps tenants' caches apart")
        self.gateways = LiveGateways(instance_id)
        usage = UsageBook(metrics)
        self.edge = Edge(
            is_open=not config.asks_for_keys,
            share=lambda: self.gateways.share,
            reservation=config.output_reservation_tokens,
            usage=usage,
            clock=time.monotonic,
            calendar=time.time,
            blind=secrets.token_bytes(32),
        )
        self._file: KeyFile | None = None
        try:
            self.edge.use_fixed(read_pairs(config.api_keys))
        except BadKeys as error:
            raise BadKeys(f"SHOAL_GATEWAY_API_KEYS: {error}") from error
        if config.api_keys_file:
            self._file = KeyFile(Path(config.api_keys_file), use=self.edge.use, report=usage.reloaded)
            try:
                self._file.load()
            except BadKeys as error:
                raise BadKeys(f"SHOAL_GATEWAY_API_KEYS_FILE {config.api_keys_file}: {error}") from error
        if not config.asks_for_keys and not config.is_local:
            logger.warning("anyone who reaches this gateway is served: SHOAL_GATEWAY_AUTH is off")

    def start(self) -> None:
        """Look after the keys file."""
        if self._file is not None:
            self._file.start()

    async def stop(self) -> None:
        """No longer."""
        if self._file is not None:
            await self._file.stop()
