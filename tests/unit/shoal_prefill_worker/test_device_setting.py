"""Where the model of a prefill worker runs is checked before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from shoal_prefill_worker.config import PrefillWorkerConfig
from shoal_prefill_worker.model import check


def test_no_name_of_a_device_is_refused_with_the_setting() -> None:
    with pytest.raises(ValueError, match=r"^SHOAL_PREFILL_WORKER_DEVICE: device must be cpu, cuda"):
        PrefillWorkerConfig(device="gpu")


def test_a_device_that_is_not_there_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^SHOAL_PREFILL_WORKER_DEVICE: cuda: this machine has no"):
        check(PrefillWorkerConfig(device="cuda"))
