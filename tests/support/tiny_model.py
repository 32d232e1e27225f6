"""The golden tiny model, loaded once per test process, and its recorded tensors.

With SHOAL_TEST_DEVICE=cuda it computes there: tests that compare the model with itself then speak of the device.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from shoal_kernels.ops.cast import cast_q8
from shoal_kernels.precision import Precision
from shoal_model.block import Normed
from shoal_model.checkpoint import Checkpoint
from shoal_model.device import open_device, served_precision
from shoal_model.load_weights import load_weights
from shoal_model.model import Model
from shoal_model.weights import BackboneWeights
from torch import Tensor

# Tensors this small lose more by threads than they gain, above all beside other test processes.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
TINY = GOLDEN / "tiny"
WINDOW, BACKTRACK, REPLAY = 16, 6, 24
DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")


@cache
def _checkpoint() -> Checkpoint:
    return Checkpoint.open(TINY)


@cache
def tiny_weights() -> BackboneWeights:
    """Weights of the tiny checkpoint; read-only."""
    device = open_device(DEVICE)
    return load_weights(_checkpoint(), precision=served_precision(device), device=device)


def tiny_model(precision: Precision | None = None, *, num_blocks: int = 9, num_slots: int = 4) -> Model:
    """A model with its own empty cache over the shared weights; in the precision that is served, if none is named."""
    return Model(
        _checkpoint().config,
        tiny_weights(),
        precision=precision or served_precision(open_device(DEVICE)),
        device=DEVICE,
        num_blocks=num_blocks,
        num_slots=num_slots,
    )


def normed(x: Tensor, precision: Precision) -> Normed:
    """A sub-layer's input given as it is."""
    return Normed(x, cast_q8(x, precision=precision))


@cache
def golden(name: str) -> dict[str, Tensor]:
    """Tensors of tests/golden/data/`name`.safetensors."""
    return load_file(GOLDEN / f"{name}.safetensors")


def text(length: int, salt: int = 0) -> list[int]:
    """A reproducible token sequence of the tiny vocabulary."""
    state, tokens = 12345 + salt, []
    for _ in range(length):
        state = (1103515245 * state + 12345) % (1 << 31)
        tokens.append(3 + (state >> 8) % 500)
    return tokens
