"""Where the model of a decode worker runs is checked before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from shoal_decode_worker.config import DecodeWorkerConfig
from shoal_decode_worker.model import check


def test_no_name_of_a_device_is_refused_with_the_setting() -> None:
    with pytest.raises(ValueError, match=r"^SHOAL_DECODE_WORKER_DEVICE: device must be cpu, cuda"):
        DecodeWorkerConfig(device="gpu")


def test_a_device_that_is_not_there_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^SHOAL_DECODE_WORKER_DEVICE: cuda: this machine has no"):
        check(DecodeWorkerConfig(device="cuda"))
