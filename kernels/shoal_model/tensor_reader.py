"""Reads the located tensors of a checkpoint, each exactly once."""

from __future__ import annotations

import mmap
import warnings
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal_model.checkpoint import Checkpoint, TensorLocation
from shoal_model.errors import CheckpointError
from shoal_model.inventory import Part, StorageType

_DTYPES = {StorageType.BF16: torch.bfloat16, StorageType.F32: torch.float32}


class TensorSource(Protocol):
    """Where the loader gets its tensors, by name."""

    def take(self, name: str) -> Tensor:
        """On the device of the computation: bfloat16 or float32; bytes (uint8) for the FP8 and FP4 types."""
        ...

    def take_mapped(self, name: str) -> Tensor:
        """uint8, in host memory."""
        ...


class TensorReader:
    """Hands out the tensors of one checkpoint. Invariant: a name leaves `_remaining` when it is taken or skipped."""

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        self._remaining = dict(checkpoint.tensors)
        self._device = torch.device(device)

    def take(self, name: str) -> Tensor:
        """A copy on the device: bfloat16 or float32 as stored; bytes (uint8, stored shape) for the FP8 and FP4 types.

        Raises CheckpointError if the file fails or ends early.
        """
        location = self._pop(name)
        buffer = np.empty(location.spec.bytes, dtype=np.uint8)
        try:
            with location.path.open("rb", buffering=0) as file:
                file.seek(location.offset)
                view = buffer.data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise CheckpointError(location.path, f"was cut short while {name} was read")
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(location.path, f"cannot be read: {error.strerror or error}") from error
        dtype = _DTYPES.get(location.spec.storage, torch.uint8)
        return torch.from_numpy(buffer).view(dtype).reshape(location.spec.shape).to(self._device)

    def take_mapped(self, name: str) -> Tensor:
        """uint8 tensor of the stored shape over a read-only mapping, always in host memory. Must not be written to.

        Only touched pages are read, and no neighbours ahead: for tables looked up by row. Raises CheckpointError.
        """
        location = self._pop(name)
        assert location.spec.storage not in _DTYPES
        try:
            return _map(location)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than the mapping would be
            raise CheckpointError(location.path, f"cannot be mapped for {name}: {error}") from error

    def skip(self, part: Part) -> None:
        """Leave the tensors of a part unread."""
        self._remaining = {n: location for n, location in self._remaining.items() if location.spec.part is not part}

    def finish(self) -> None:
        """Assert that every tensor was taken or skipped: the inventory and the loader name the same tensors."""
        assert not self._remaining, f"{next(iter(self._remaining))} and {len(self._remaining) - 1} more were not read"

    def _pop(self, name: str) -> TensorLocation:
        assert name in self._remaining, f"{name} is read twice or is no tensor of this configuration"
        return self._remaining.pop(name)


def _map(location: TensorLocation) -> Tensor:
    start = location.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skipped = location.offset - start
    with location.path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), skipped + location.spec.bytes, access=mmap.ACCESS_READ, offset=start)
    if hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_RANDOM)
    values = np.frombuffer(mapping, dtype=np.uint8, count=prod(location.spec.shape), offset=skipped)
    with warnings.catch_warnings():
        # torch warns that the memory is read-only; it is meant to be.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(values.reshape(location.spec.shape))
