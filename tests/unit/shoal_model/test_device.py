"""Devices by name: what is refused, and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shoal_kernels.precision import SERVED, SERVED_BF16
from shoal_model import device as devices
from shoal_model.device import (
    DeviceName,
    DeviceUnavailable,
    DoesNotFit,
    accelerator_class,
    check_room,
    open_device,
    parse_device,
    served_precision,
)

HOST = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, *, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    """A machine with so many CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an accelerator")


def test_a_name_is_a_kind_and_perhaps_a_number() -> None:
    assert [parse_device(text) for text in ("cpu", "cuda", "cuda:1", "npu")] == [
        DeviceName("cpu"),
        DeviceName("cuda"),
        DeviceName("cuda", 1),
        DeviceName("npu"),
    ]


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", " cuda", "cuda:1:2"])
def test_anything_else_is_no_device(text: str) -> None:
    with pytest.raises(ValueError, match="cpu, cuda, cuda:N or npu"):
        parse_device(text)


def test_naming_devices_needs_no_torch() -> None:
    script = "import sys, shoal_model.device as d; d.parse_device('cuda'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=0)
    with pytest.raises(DeviceUnavailable, match=r"^cuda: this machine has no CUDA device"):
        open_device("cuda")
    pretend(monkeypatch, count=2)
    assert open_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceUnavailable, match=r"^cuda:2: there are 2"):
        open_device("cuda:2")
    with pytest.raises(DeviceUnavailable, match="compiled, not yet run"):
        open_device("npu")


def test_a_device_without_the_tensor_cores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=1, capability=(8, 0))
    with pytest.raises(DeviceUnavailable, match=r"capability 8\.0, the kernels need 9\.0"):
        open_device("cuda")


def test_the_host_serves_in_float32_and_an_accelerator_in_bfloat16() -> None:
    assert served_precision(HOST) is SERVED
    assert served_precision(torch.device("cuda", 0)) is SERVED_BF16


def test_an_accelerator_class_tells_capability_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=1)
    assert accelerator_class(torch.device("cuda", 0)).startswith("cuda/sm90/torch ")
    assert accelerator_class(HOST).startswith("cpu/")


def test_a_cache_that_does_not_fit_says_what_it_needs_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(HOST, 1 << 60, "blocks")
    monkeypatch.setattr(devices, "free_bytes", lambda _: 3 << 30)
    check_room(torch.device("cuda", 0), 3 << 30, "blocks")
    with pytest.raises(DoesNotFit, match=r"9 blocks need 3\.5 GiB, .* cuda:0 3\.0 GiB are free") as caught:
        check_room(torch.device("cuda", 0), 7 << 29, "9 blocks")
    assert (caught.value.wanted, caught.value.free) == (7 << 29, 3 << 30)


def test_a_host_tells_what_is_free_below_the_limit_of_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    everything = devices.free_host_bytes()
    assert everything is None or everything > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert devices.free_host_bytes() is None or devices.free_host_bytes() != 0
    (tmp_path / "memory.max").write_text("12288\n")
    assert devices.free_host_bytes() in (None, 8192)
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 1 << 30)
    devices.check_host_room(1 << 30, "weights")
    with pytest.raises(DoesNotFit, match=r"weights need 1\.5 GiB, of the memory of this machine 1\.0 GiB are free"):
        devices.check_host_room(3 << 29, "weights")
