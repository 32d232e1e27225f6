"""Identities of what is cached and of what is computed: who may exchange KV, and whose tokens are equal.

Source: mesh.md sections 5 and 6. Two workers with one `kv_id` store the same bytes in the same layout; two with one
`numerics_id` give the same tokens for the same request.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass

import torch

from shoal_model.model import Model
from shoal_model.revision import WeightsRevision

KERNEL_SET = "fixed-order-f32"
KERNEL_VERSION = 1
"""Raise it with any change of arithmetic order, rounding or formats in shoal_kernels or shoal_model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsInfo:
    """What a worker announces. Ids are hex SHA-256; `draft_id` is None without a draft head."""

    kv_id: str
    draft_id: str | None
    numerics_id: str
    accelerator_class: str
    precision: str
    replay_length: int
    is_invariant: bool


def describe_numerics(model: Model, revision: WeightsRevision, *, replay_length: int) -> NumericsInfo:
    """Identities of a loaded model whose prompts replay their last `replay_length` rows.

    raises  ValueError where the replay is shorter than window + backtrack: decode would miss window rows
    """
    least = model.config.sliding_window + model.backtrack
    if replay_length < least:
        raise ValueError(f"the replay must be at least window + backtrack = {least} rows, got {replay_length}")
    layout = model.cache.pages.layout
    kv_id = _digest(
        {
            "weights": revision.weights,  # covers configuration and tokenizer
            "precision": model.precision.name,
            "block_bytes": layout.block_bytes,
            "owners": [[o.layer, o.ratio, o.index.offset, o.main.offset] for o in layout.owners],
            "units": [[o.index.row_units, o.main.row_units] for o in layout.owners],
        }
    )
    # Compiled and reference kernels give equal bits, so only the set is named, not which of the two ran. In float64 the
    # library's own matrix products are used, which promise no bits.
    is_invariant = model.precision.dtype == torch.float32
    accelerator = cpu_class()
    numerics_id = _digest(
        {
            "kv_id": kv_id,
            "kernels": [KERNEL_SET, KERNEL_VERSION],
            "accelerator": accelerator,
            "replay": ["compact", replay_length],
            "invariant": is_invariant,
        }
    )
    return NumericsInfo(
        kv_id=kv_id,
        draft_id=revision.draft,
        numerics_id=numerics_id,
        accelerator_class=accelerator,
        precision=model.precision.name,
        replay_length=replay_length,
        is_invariant=is_invariant,
    )


def cpu_class() -> str:
    """Instruction set, its level as torch sees it, and torch's version, e.g. "cpu/x86_64/AVX2/2.13.0"."""
    version = torch.__version__.split("+")[0]
    return f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{version}"


def _digest(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
