"""Identities of what is cached and of what is computed: who may exchange KV, and whose tokens are equal.

Source: mesh.md sections 5 and 6. Two workers with one `kv_id` store the same bytes in the same layout; two with one
`numerics_id` give the same tokens for the same request.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from shoal_kernels import registry
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision

from shoal_model.device import accelerator_class
from shoal_model.model import Model
from shoal_model.revision import WeightsRevision

KERNEL_SET, DEVICE_KERNEL_SET = "fixed-order-f32", "fixed-segments-bf16"
KERNEL_VERSION, DEVICE_KERNEL_VERSION = 1, 1
"""Raise them with any change of arithmetic order, rounding or formats in shoal_kernels or shoal_model."""

_FORMATS = {SERVED_BF16.name: SERVED.name}
"""Precisions that store the bytes of another one."""


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
            "precision": _FORMATS.get(model.precision.name, model.precision.name),
            "block_bytes": layout.block_bytes,
            "owners": [[o.layer, o.ratio, o.index.offset, o.main.offset] for o in layout.owners],
            "units": [[o.index.row_units, o.main.row_units] for o in layout.owners],
        }
    )
    # In float64 the library's own matrix products are used, which promise no bits.
    is_invariant = model.precision.dtype != torch.float64
    accelerator = accelerator_class(model.device)
    numerics_id = _digest(
        {
            "kv_id": kv_id,
            "kernels": kernel_set(model.device.type, model.precision),
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


def kernel_set(device_type: str, precision: Precision) -> list[object]:
    """Which kernels compute, as far as it decides bits.

    On the host compiled and reference kernels give equal bits, so only the set is named. On an accelerator every
    backend has an order of its own, so the one that serves each operation belongs to the name.
    """
    if not precision.keeps_bytes:
        return [KERNEL_SET, KERNEL_VERSION]
    serving = registry.backends(device_type, precision)
    return [DEVICE_KERNEL_SET, DEVICE_KERNEL_VERSION, [[op, serving[op]] for op in sorted(serving)]]


def _digest(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
