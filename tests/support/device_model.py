"""The tiny model as accelerators compute it: on the CUDA device if there is one, else in Triton's interpreter."""

from __future__ import annotations

from functools import cache

import torch
from shoal_kernels.precision import SERVED_BF16
from shoal_kernels.row_formats import window_format
from shoal_model.checkpoint import Checkpoint
from shoal_model.load_weights import load_weights
from shoal_model.model import Model
from shoal_model.sequence import SequenceRun
from shoal_model.weights import BackboneWeights
from support.on_device import DEVICE
from support.tiny_model import REPLAY, TINY
from torch import Tensor


@cache
def _weights() -> BackboneWeights:
    return load_weights(Checkpoint.open(TINY), precision=SERVED_BF16, device=DEVICE)


def device_model(*, num_blocks: int = 9, num_slots: int = 4) -> Model:
    """The tiny model with its own empty cache over shared weights."""
    return Model(
        Checkpoint.open(TINY).config,
        _weights(),
        precision=SERVED_BF16,
        device=DEVICE,
        num_blocks=num_blocks,
        num_slots=num_slots,
    )


def start(model: Model, slot: int, *, replay_of: int | None = None) -> SequenceRun:
    """A sequence in its own slot and two blocks, with replay over a prompt of `replay_of` tokens."""
    return SequenceRun(
        model,
        slot=slot,
        block_table=[1 + 2 * slot, 2 + 2 * slot],
        prompt_length=replay_of,
        replay_length=None if replay_of is None else REPLAY,
    )


def run_all(run: SequenceRun, tokens: list[int], chunk: int) -> Tensor:
    """Hidden rows of all tokens, run in chunks."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    return torch.cat([run.run(part, range(len(part))) for part in parts])


def window_values(rows: Tensor) -> Tensor:
    """What window rows stand for, in float32 on the host: they are records on an accelerator."""
    if rows.dtype != torch.uint8:
        return rows.float().cpu()
    return window_format(rows.shape[-1] * 32 // 33, SERVED_BF16).decode(rows).float().cpu()
