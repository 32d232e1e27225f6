"""Whom the gateway may call, from presence: schedulers and decode workers."""

from __future__ import annotations

from shoal_common.presence import Presence

from shoal_gateway.edge.live import LiveGateways
from shoal_gateway.frames_client import FramesClient
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.reserve_client import ReserveClient


class Fleet:
    """Passes what presence says on to the streams."""

    def __init__(
        self,
        *,
        reserve: ReserveClient,
        frames: FramesClient,
        chains: PrefixChains,
        gateways: LiveGateways,
    ) -> None:
        self._reserve, self._frames, self._chains, self._gateways = reserve, frames, chains, gateways
        self._roles: dict[str, str] = {}
        self._contexts: dict[str, int] = {}

    @property
    def context_tokens(self) -> int | None:
        """The most that prompt and output may have together on the roomiest worker; None if none says."""
        return max(self._contexts.values(), default=None)

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
