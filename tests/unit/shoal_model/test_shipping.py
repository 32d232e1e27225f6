"""A plan on its way to a device: nothing on the host, one packed copy elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from shoal_model.shipping import ship
from support.on_device import needs_device
from torch import Tensor


@dataclass(frozen=True)
class Part:
    index: Tensor
    flags: Tensor


@dataclass(frozen=True)
class Plan:
    part: Part
    by_ratio: dict[int, Tensor]
    missing: Tensor | None
    count: int


def plan() -> Plan:
    ints = torch.arange(12, dtype=torch.int64).view(3, 4)
    return Plan(
        part=Part(ints[:, 1:], torch.tensor([True, False, True])),
        by_ratio={1: torch.arange(5, dtype=torch.int32), 2: torch.empty(2, 0, dtype=torch.int64)},
        missing=None,
        count=3,
    )


def test_on_the_host_a_plan_is_itself() -> None:
    it = plan()
    assert ship(it, torch.device("cpu")) is it


@pytest.mark.gpu
@needs_device
def test_a_shipped_plan_holds_the_same_values() -> None:
    before, device = plan(), torch.device("cuda", 0)
    after = ship(before, device)
    assert (after.missing, after.count) == (None, 3)
    for one, other in (
        (after.part.index, before.part.index),
        (after.part.flags, before.part.flags),
        (after.by_ratio[1], before.by_ratio[1]),
        (after.by_ratio[2], before.by_ratio[2]),
    ):
        assert one.device == device
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)
