"""Where a model runs: the one place that knows host from accelerator. Importing it needs no torch.

A device is named "cpu", "cuda", "cuda:1" or "npu". On the host a model computes in float32 with every rounding of
serving; on an accelerator in bfloat16 over stored bytes.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from shoal_kernels.precision import Precision

LEAST_CAPABILITY = (9, 0)
"""Hopper. Older GPUs have neither the FP8 conversions nor the tensor cores that the kernels are written for."""

_CGROUP = Path("/sys/fs/cgroup")
_NAME = re.compile(r"(cpu|cuda|npu)(?::(\d{1,3}))?")


class DeviceUnavailable(RuntimeError):
    """The device asked for is not here, or no kernels run on it."""


class DoesNotFit(RuntimeError):
    """Weights, or blocks and state slots, need more memory than is left."""

    def __init__(self, message: str, *, wanted: int, free: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.free = free


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device as a person writes it. Without `index`: the first of its kind."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_device(text: str) -> DeviceName:
    """Raises ValueError for anything but "cpu", "cuda", "cuda:N", "npu" and "npu:N"."""
    found = _NAME.fullmatch(text)
    if found is None or (found[1] == "cpu" and found[2] is not None):
        raise ValueError(f"device must be cpu, cuda, cuda:N or npu, got {text!r}")
    return DeviceName(found[1], None if found[2] is None else int(found[2]))


def open_device(device: str | torch.device) -> torch.device:
    """The torch device, known to be usable. Raises ValueError for no name of a device, DeviceUnavailable."""
    import torch

    name = parse_device(str(device))
    if name.kind == "cpu":
        return torch.device("cpu")
    if name.kind == "npu":
        raise DeviceUnavailable("npu: its kernels are compiled, not yet run; use cuda or cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceUnavailable(f"{name}: this machine has no CUDA device, or torch is not built for CUDA")
    index = name.index or 0
    if index >= count:
        raise DeviceUnavailable(f"{name}: there are {count} CUDA devices")
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise DeviceUnavailable(
            f"{name}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}, the kernels need {least}"
        )
    return torch.device("cuda", index)


def served_precision(device: torch.device) -> Precision:
    """The precision that a device serves in."""
    from shoal_kernels.precision import SERVED, SERVED_BF16

    return SERVED if device.type == "cpu" else SERVED_BF16


def use(device: torch.device) -> None:
    """Make an accelerator the calling thread's current one: kernels are launched there, wherever their tensors lie."""
    if device.type != "cpu":
        import torch

        torch.cuda.set_device(device.index or 0)


def accelerator_class(device: torch.device) -> str:
    """What decides a device's bits besides the kernels.

    Host: instruction set and its level as torch sees it, torch's version ("cpu/x86_64/AVX2/2.13.0"). CUDA: the
    capability and the versions that compile and run kernels ("cuda/sm90/torch 2.11.0/triton 3.6.0/tilelang 0.1.15").
    """
    import torch

    version = torch.__version__.split("+")[0]
    if device.type == "cpu":
        return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{version}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda/sm{major}{minor}/torch {version}/triton {_version('triton')}/tilelang {_version('tilelang')}"


def free_bytes(device: torch.device) -> int | None:
    """Memory that a process can still take on an accelerator; None on the host, which has its own limits."""
    import torch

    if device.type == "cpu":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int | None:
    """Memory that a process can still take on this machine without driving others out; None where it is not told."""
    found = _first_number(Path("/proc/meminfo"), r"MemAvailable:\s*(\d+) kB")
    if found is None:
        return None
    limit = _first_number(_CGROUP / "memory.max", r"(\d+)")
    used = _first_number(_CGROUP / "memory.current", r"(\d+)")
    if limit is None or used is None:
        return found * 1024
    return min(found * 1024, max(0, limit - used))


def check_room(device: torch.device, wanted: int, what: str) -> None:
    """Raises DoesNotFit where `wanted` bytes are not free on an accelerator."""
    _check(free_bytes(device), wanted, what, f"device {device}")


def check_host_room(wanted: int, what: str) -> None:
    """Raises DoesNotFit where `wanted` bytes are not free on this machine."""
    _check(free_host_bytes(), wanted, what, "this machine")


def _check(free: int | None, wanted: int, what: str, place: str) -> None:
    if free is not None and wanted > free:
        raise DoesNotFit(
            f"{what} need {wanted / 2**30:.1f} GiB, of the memory of {place} {free / 2**30:.1f} GiB are free",
            wanted=wanted,
            free=free,
        )


def _first_number(file: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def machine_name(device: torch.device) -> str:
    """What decides how fast a device is: its name and driver; of the host its processor and number of cores."""
    import torch

    if device.type == "cpu":
        return f"{_processor()}, {os.cpu_count()} cores"
    driver = _line("/proc/driver/nvidia/version", "NVRM version") or "unknown driver"
    return f"{torch.cuda.get_device_name(device)}, {driver}, CUDA {torch.version.cuda}"


def _processor() -> str:
    return _line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _line(path: str, name: str) -> str:
    """What follows `name:` in a file of the kernel; empty where there is none."""
    try:
        with open(path, encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    except OSError:
        return ""
