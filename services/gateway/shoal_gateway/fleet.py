"""Whom the gateway may call, from presence: schedulers, decode workers, and whether a request would be served."""

from __future__ import annotations

import asyncio

from shoal_common.presence import Presence
from shoal_common.rpc import Readiness

from shoal_gateway.edge.live import LiveGateways
from shoal_gateway.frames_client import FramesClient
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.reserve_client import ReserveClient

CONDITIONS = ("nats", "scheduler", "decode worker")
_TICK_S = 0.1


class Fleet:
    """Passes what presence says on to the streams, and tells the readiness what they reach."""

    def __init__(
        self,
        *,
        reserve: ReserveClient,
        frames: FramesClient,
        chains: PrefixChains,
        gateways: LiveGateways,
        readiness: Readiness,
    ) -> None:
        self._reserve, self._frames, self._chains = reserve, frames, chains
        self._gateways, self._readiness = gateways, readiness
        self._roles: dict[str, str] = {}
        self._contexts: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def context_tokens(self) -> int | None:
        """The most that prompt and output may have together on the roomiest worker; None if none says."""
        return max(self._contexts.values(), default=None)

    def start(self) -> None:
        """Begin to keep the readiness true."""
        self._task = asyncio.create_task(self._tick_for_ever())

    async def stop(self) -> None:
        """Leave the readiness as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_up(self, presence: Presence) -> None:
        """An instance is new or says something new."""
        self._roles[presence.instance_id] = presence.role
        if presence.role == "scheduler":
            self._reserve.announced(presence.instance_id, presence.address)
        elif presence.role == "gateway":
            self._gateways.announced(presence)
        elif presence.role == "decode_worker":
            self._frames.announced(presence.instance_id, presence.address)
            self._chains.announced(presence)
            context = presence.capacity.get("max_context") or presence.capacity.get("context_tokens")
            if context:
                self._contexts[presence.instance_id] = context

    def on_down(self, instance_id: str) -> None:
        """An instance is gone."""
        role = self._roles.pop(instance_id, "")
        if role == "scheduler":
            self._reserve.lapsed(instance_id)
        elif role == "gateway":
            self._gateways.lapsed(instance_id)
        elif role == "decode_worker":
            self._frames.lapsed(instance_id)
            self._chains.lapsed(instance_id)
            self._contexts.pop(instance_id, None)

    async def _tick_for_ever(self) -> None:
        while True:
            self._readiness.set("scheduler", self._reserve.is_connected)
            self._readiness.set("decode worker", self._frames.open_count > 0)
            await asyncio.sleep(_TICK_S)
