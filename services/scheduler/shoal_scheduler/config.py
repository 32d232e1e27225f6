"""Settings of a scheduler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shoal_scheduler.core.cost import CostModel
from shoal_scheduler.core.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """SHOAL_SCHEDULER_<FIELD>.

    listen_address          host:port of the gRPC server; port 0 picks one
    advertised_address      what others are told to call; empty: the address listened on
    admin_address           host:port of /metrics, /healthz and /readyz
    remote_prefill_tokens   a prompt with fewer uncached tokens than this is prefilled by its decode worker
    replay_tokens           K, the replay length: a hit ends at least so far below the prompt's end
    busy_tokens             one more request on a worker costs as much as so many uncached tokens
    pressure_tokens         a worker's last free block costs as much as so many uncached tokens
    max_index_entries       blocks, and as many snapshots, that the KV index keeps at most
    max_gateways            Reserve streams at most
    max_outbox              answers that may wait for one gateway to read; past it the stream ends
    default_remaining_s     deadline of a request that names none
    drain_grace_s           from SIGTERM to the end
    The others are those of core.limits.Limits.
    """

    listen_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    admin_address: str = "127.0.0.1:0"
    remote_prefill_tokens: int = 512
    replay_tokens: int = 140
    busy_tokens: float = 256.0
    pressure_tokens: float = 1024.0
    max_index_entries: int = 65_536
    max_gateways: int = 256
    max_outbox: int = 8192
    default_remaining_s: float = 600.0
    drain_grace_s: float = 2.0
    max_queued: int = 4096
    max_refusals: int = 5
    max_losses: int = 8
    max_chain_length: int = 1_000_000
    view_settle_s: float = 1.5
    homeless_wait_s: float = 10.0
    stream_grace_s: float = 5.0
    stale_s: float = 5.0
    suspect_s: float = 5.0
    longest_suspect_s: float = 60.0
    refusal_hold_s: float = 1.0
    unreachable_hold_s: float = 3.5
    refusal_backoff_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("max_index_entries", "max_gateways", "max_outbox", "max_queued"):
            self._check(name, getattr(self, name) >= 1, "positive")
        for name in ("remote_prefill_tokens", "replay_tokens", "max_refusals", "max_losses", "max_chain_length"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("busy_tokens", "pressure_tokens"):
            self._check(name, 0 <= getattr(self, name) < 1e9, "in [0, 1e9)")
        for field in dataclasses.fields(self):
            if field.name.endswith("_s"):
                self._check(field.name, 0 < getattr(self, field.name) <= 3600, "in (0, 3600]")

    def _check(self, name: str, is_good: bool, wanted: str) -> None:
        if not is_good:
            raise ValueError(f"SHOAL_SCHEDULER_{name.upper()} must be {wanted}, got {getattr(self, name)}")

    def limits(self) -> Limits:
        """The bounds of the core."""
        return Limits(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Limits)})

    def cost_model(self) -> CostModel:
        """The weights of the core."""
        return CostModel(busy_tokens=self.busy_tokens, pressure_tokens=self.pressure_tokens)
