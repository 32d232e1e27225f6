"""Weights out of a seed, in the released formats and of sane size: for measuring without a checkpoint.

Made where they are used, so that layers of released size take seconds and no disk.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.device import check_host_room, check_room
from shoal_model.engram_tables import build_hashes
from shoal_model.inventory import Part, StorageType, TensorSpec, build_inventory
from shoal_model.load_weights import prepare_weights
from shoal_model.released_sizes import DEFAULT_EP_SIZE, NUM_LAYERS, released_share
from shoal_model.weights import BackboneWeights

RELEASED = "released"
_E4M3_STEP = 80.0  # standard deviation of the stored e4m3 values
_E2M1_STEP = 2.926  # that of uniform e2m1 codes
_TILE_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Which synthetic model: `released` sizes, how many layers, the share of one of `ep_size` ranks, the seed."""

    sizes: str = RELEASED
    num_layers: int = NUM_LAYERS
    ep_size: int = DEFAULT_EP_SIZE
    seed: int = 0

    def config(self) -> ModelConfig:
        """Raises ValueError for other sizes, and as `released_share`."""
        if self.sizes != RELEASED:
            raise ValueError(f"synthetic sizes must be {RELEASED}, got {self.sizes!r}")
        return released_share(self.num_layers, self.ep_size)


def synthetic_weights(config: ModelConfig, *, precision: Precision, device: torch.device, seed: int) -> BackboneWeights:
    """Random weights of every text tensor of a configuration; equal for equal seeds on one kind of device."""
    hashes = {} if config.engram is None else {found.layer: found for found in build_hashes(config.engram)}
    compressed_ids = None
    if config.engram is not None:
        compressed_ids = torch.arange(config.vocab_size) % config.engram.compressed_vocab_size
    return prepare_weights(config, _RandomTensors(config, device, seed), hashes, compressed_ids, precision)


def check_weights(config: ModelConfig, precision: Precision, device: torch.device) -> None:
    """Raises DoesNotFit where `synthetic_weights` would need more memory than is left."""
    others, tables = weight_bytes(config, precision)
    what = f"the weights of {config.num_hidden_layers} layers"
    if device.type == "cpu":
        check_host_room(others + tables, what)
    else:
        check_room(device, others, what)
        check_host_room(tables, "the Engram tables")


def weight_bytes(config: ModelConfig, precision: Precision) -> tuple[int, int]:
    """About what weights take where a model computes, and what the Engram tables take in host memory."""
    specs = [spec for spec in build_inventory(config).values() if spec.part is not Part.VISION]
    tables = sum(spec.bytes for spec in specs if spec.part is Part.ENGRAM_TABLE)
    return sum(_held_bytes(spec, precision) for spec in specs if spec.part is not Part.ENGRAM_TABLE), tables


def _held_bytes(spec: TensorSpec, precision: Precision) -> int:
    """Memory of a tensor as `prepare_weights` keeps it: as stored, or products as float32 values without scales."""
    if precision.keeps_bytes or spec.name.endswith("embed.weight"):
        return spec.bytes
    return 4 * spec.parameters


class _RandomTensors:
    """A `TensorSource` that draws each tensor from the seed and its name."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self._specs = build_inventory(config)
        self._device = device
        self._seed = seed

    def take(self, name: str) -> Tensor:
        spec = self._specs[name]
        generator = torch.Generator(self._device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        if spec.storage is StorageType.F8_E8M0:
            return torch.full(spec.shape, self._scale_byte(name), dtype=torch.uint8, device=self._device)
        if spec.storage is StorageType.FP4_PAIRS:
            shape = spec.shape
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=self._device)
        values = torch.randn(spec.shape, generator=generator, device=self._device)
        if spec.storage is StorageType.F8_E4M3:
            return (values * _E4M3_STEP).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        values = _shaped(spec, values)
        return values if spec.storage is StorageType.F32 else values.to(torch.bfloat16)

    def take_mapped(self, name: str) -> Tensor:
        rows, width = self._specs[name].shape
        if self._specs[name].storage is StorageType.F8_E8M0:
            return torch.full((rows, width), 127, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        tile: Tensor = torch.randint(0, 256, (min(rows, _TILE_ROWS), width), generator=generator, dtype=torch.uint8)
        tile &= 0xBF  # without the upper exponents: no NaN, nothing beyond 2
        return tile.repeat(-(-rows // _TILE_ROWS), 1)[:rows]

    def _scale_byte(self, name: str) -> int:
        """Output rows of about unit size for unit inputs, whatever their width."""
        weight = self._specs[name.removesuffix("scale") + "weight"]
        is_packed = weight.storage is StorageType.FP4_PAIRS
        depth, step = weight.shape[1] * (2 if is_packed else 1), _E2M1_STEP if is_packed else _E4M3_STEP
        return 127 + round(-math.log2(step * math.sqrt(depth)))


def _shaped(spec: TensorSpec, values: Tensor) -> Tensor:
    """Unit normal values as the tensor's name wants them: gains near 1, products of unit size, small offsets."""
    if spec.name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1.0 + 0.1 * values
    if spec.name.endswith("embed.weight"):
        return values
    if len(spec.shape) == 2:
        return values / math.sqrt(spec.shape[1])
    return 0.1 * values + (0.5 if spec.name.endswith("_scale") else 0.0)
