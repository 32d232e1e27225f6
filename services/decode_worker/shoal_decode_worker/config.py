"""Settings of a decode worker's service side; those of its engine are in `engine_config`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """What a decode worker and a mock rank have in common. Lengths of time in seconds.

    advertise_address    host:port that others reach this worker by; empty: the one it listens on
    beat_s               between two beats on a Frames stream
    gateway_expiry_s     silence after which a gateway's requests are aborted
    max_requests         Generate calls open at once
    max_gateways         Frames streams open at once
    drain_grace_s        from SIGTERM to the end; what then still runs is moved `drain_move_s` before
    """

    listen_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    advertise_address: str = ""
    beat_s: float = 1.0
    gateway_expiry_s: float = 30.0
    max_requests: int = 1024
    max_gateways: int = 256
    drain_grace_s: float = 10.0
    drain_move_s: float = 2.0

    def check(self, prefix: str) -> None:
        """Raise ValueError with the variable's name for a value out of range."""
        for name in ("beat_s", "gateway_expiry_s", "max_requests", "max_gateways"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{prefix}_{name.upper()} must be positive, got {value}")
        if not 0 <= self.drain_move_s <= self.drain_grace_s:
            raise ValueError(f"{prefix}_DRAIN_MOVE_S must be in [0, drain_grace_s], got {self.drain_move_s}")
