"""What a loaded checkpoint is called in the mesh."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from shoal_common import identity
from shoal_kernels.threads import get_num_threads
from shoal_model.checkpoint import Checkpoint
from shoal_model.device import accelerator_class, machine_name, served_precision
from shoal_model.numerics import kernel_set
from shoal_model.revision import weights_revision

from shoal_engine.verify.setup import Drafter

KERNELS = "fixed-order 1"
"""Kernel set and version; changes with any bit of any result."""
LAYOUT = "blocks 128, logical rows 1"
FORMATS = "window Q8, main Q4nv, index Q4ue, weights as released"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Name and ids of a checkpoint on this machine. `draft_id` is empty without a draft head.

    is_invariant   a row's bits do not depend on its batch: answers can be exact
    """

    model: str
    kv_id: str
    numerics_id: str
    draft_id: str
    is_invariant: bool


def identify(
    directory: str | Path, *, name: str, replay_length: int, device: torch.device | None = None
) -> ModelIdentity:
    """Read a checkpoint's identity. `name` is what clients say; empty takes the folder's. Raises CheckpointError.

    Without `device` the model runs on the host. Workers on either side store the same formats: one `kv_id`; but they
    compute other bits, so their `numerics_id` differ.
    """
    # In float64 the library's own matrix products are used, which promise no bits.
    is_invariant = served_precision(device or torch.device("cpu")).dtype != torch.float64
    revision = weights_revision(Checkpoint.open(directory))
    # The tokenizer and the configuration are part of the revision.
    kv_id = identity.kv_id(weights_revision=revision.weights, layout=LAYOUT, formats=FORMATS, tokenizer="in revision")
    numerics_id = identity.numerics_id(
        kv_id=kv_id,
        kernels=_kernels(device),
        accelerator=_accelerator(device),
        parallel="1",
        replay_mode="bounded",
        replay_tokens=replay_length,
        invariant=is_invariant,
    )
    draft_id = identity.draft_id(draft_weights_revision=revision.draft) if revision.draft else ""
    return ModelIdentity(
        model=name or Path(directory).resolve().name,
        kv_id=kv_id,
        numerics_id=numerics_id,
        draft_id=draft_id,
        is_invariant=is_invariant,
    )


def drafter(directory: Path, identity: ModelIdentity, device: torch.device) -> Drafter:
    """The draft head of a checkpoint, with what its steps cost on this device and with the threads now set."""
    return Drafter(
        directory=directory,
        draft_id=identity.draft_id,
        cost_key={
            "numerics": identity.numerics_id,
            "draft": identity.draft_id,
            "machine": machine_name(device),
            "threads": str(get_num_threads()),
        },
    )


def _kernels(device: torch.device | None) -> str:
    if device is None or device.type == "cpu":
        return KERNELS
    return json.dumps(kernel_set(device.type, served_precision(device)))


def _accelerator(device: torch.device | None) -> str:
    if device is None or device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    return accelerator_class(device)
