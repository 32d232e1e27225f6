"""What it costs to run a request on a worker. Lower is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_scheduler.core.instance import Instance
from shoal_scheduler.core.requests import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Weights, all in prompt tokens to compute: the unit in which a cache hit and a busy worker can be compared.

    busy_tokens       one more request on a worker is worth so many
    pressure_tokens   taking a worker's last free block is worth so many; half of the free ones half as many
    """

    busy_tokens: float = 256.0
    pressure_tokens: float = 1024.0

    def of(self, worker: Instance, need: Need, uncached_tokens: int, now_s: float) -> float:
        """Cost of one worker, for a request that it has room for."""
        pressure = need.blocks / max(worker.free_blocks(now_s), need.blocks, 1)
        return uncached_tokens + self.busy_tokens * worker.busy(now_s) + self.pressure_tokens * pressure


def cheapest(costs: Sequence[tuple[float, str]], after: str) -> str:
    """The id with the least cost; among equal ones the first behind `after` in the order of ids, then round.

    costs   (cost, instance id), not empty
    """
    least = min(cost for cost, _ in costs)
    ties = sorted(instance_id for cost, instance_id in costs if cost == least)
    return next((one for one in ties if one > after), ties[0])
