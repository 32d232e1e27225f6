"""What a checkpoint is, from config and index alone: sizes, formats, layers, and one rank's part of it.

Needs no torch and no shards; the headers of shards that are there are checked. Sizes of cache records: v41-flash
specification, sections 4 and 8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import TypeVar

from shoal_model.checkpoint import locate_tensors, read_index
from shoal_model.config import ModelConfig
from shoal_model.engram_tables import build_hashes
from shoal_model.inventory import Part, StorageType, TensorSpec, build_inventory
from shoal_model.layer_map import LayerPlan, build_layer_map

_ENGRAM_ROW_ALIGNMENT = 256

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Size of a group of tensors. `parameters` leaves scales out and counts a byte of FP4 pairs as two."""

    tensors: int
    parameters: int
    bytes: int


_NOTHING = Amount(tensors=0, parameters=0, bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    plan: LayerPlan
    amount: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What the fullest rank of an expert-parallel group holds, in bytes.

    Routed experts are divided by expert and Engram tables by row (rows padded to a multiple of lcm(256, ranks));
    everything else is on every rank.
    """

    num_ranks: int
    num_experts: int
    """Routed experts of each backbone layer."""
    num_draft_experts: int
    expert_bytes: int
    engram_table_bytes: int
    replicated_bytes: int

    @property
    def bytes(self) -> int:
        return self.expert_bytes + self.engram_table_bytes + self.replicated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """Bytes of context in the released record formats."""

    kv_bytes_per_token: Fraction
    window_row_bytes: int
    snapshot_bytes: int
    """Window rows of all encoder layers, one sliding window long: what a stored boundary adds to its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    config: ModelConfig
    total: Amount
    parts: Mapping[Part, Amount]
    formats: Mapping[StorageType, Amount]
    layers: tuple[LayerReport, ...]
    draft_blocks: tuple[Amount, ...]
    cache: CacheReport
    rank: RankReport
    num_shards: int
    num_shards_present: int


def inspect_checkpoint(directory: str | Path, *, num_ranks: int = 1) -> CheckpointReport:
    """Describe the checkpoint in `directory`.

    Raises CheckpointError if config, index or a present shard is wrong; ValueError unless `num_ranks` is between 1 and
    the number of routed experts.
    """
    directory = Path(directory)
    config = ModelConfig.load(directory)
    if config.engram is not None:
        build_hashes(config.engram, directory / "config.json")
    inventory = build_inventory(config)
    index = read_index(directory, inventory)
    located = locate_tensors(index, inventory, absent_shards_allowed=True)
    specs = inventory.values()
    parts = _amounts((spec.part, spec) for spec in specs)
    formats = _amounts((spec.storage, spec) for spec in specs)
    layers = _amounts((spec.layer, spec) for spec in specs)
    draft_blocks = _amounts((spec.draft_block, spec) for spec in specs)
    return CheckpointReport(
        config=config,
        total=_amounts((None, spec) for spec in specs)[None],
        parts={part: parts.get(part, _NOTHING) for part in Part},
        formats={storage: formats.get(storage, _NOTHING) for storage in StorageType},
        layers=tuple(LayerReport(plan=plan, amount=layers[plan.layer]) for plan in build_layer_map(config).layers),
        draft_blocks=tuple(draft_blocks[block] for block in range(config.num_draft_blocks)),
        cache=cache_report(config),
        rank=rank_report(config, specs, num_ranks),
        num_shards=len(index.shards),
        num_shards_present=len({location.path for location in located.values()}),
    )


def cache_report(config: ModelConfig) -> CacheReport:
    """Sizes of the cache: main KV in FP4 with a scale byte per 16, index keys per 32, window rows in FP8 per 32."""
    main_row_bytes = config.head_dim // 2 + config.head_dim // 16
    index_row_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
    window_row_bytes = config.head_dim + config.head_dim // 32
    owners = build_layer_map(config).kv_owners
    return CacheReport(
        kv_bytes_per_token=sum(
            (Fraction(main_row_bytes + index_row_bytes, plan.ratio) for plan in owners), Fraction(0)
        ),
        window_row_bytes=window_row_bytes,
        snapshot_bytes=config.boundary * config.sliding_window * window_row_bytes,
    )


def rank_report(config: ModelConfig, specs: Iterable[TensorSpec], num_ranks: int) -> RankReport:
    """The fullest rank's part of `specs`. Raises ValueError for more ranks than experts, or none."""
    if not 1 <= num_ranks <= config.n_routed_experts:
        raise ValueError(f"ranks must be between 1 and {config.n_routed_experts} (routed experts), got {num_ranks}")
    num_experts = -(-config.n_routed_experts // num_ranks)
    num_draft_experts = -(-config.dspark.n_routed_experts // num_ranks) if config.dspark else 0
    expert_bytes = table_bytes = replicated_bytes = 0
    alignment = lcm(_ENGRAM_ROW_ALIGNMENT, num_ranks)
    for spec in specs:
        if spec.part is Part.EXPERTS:
            held = num_experts if spec.draft_block is None else num_draft_experts
            expert = int(spec.name.split(".experts.")[1].split(".")[0])
            expert_bytes += spec.bytes if expert < held else 0
        elif spec.part is Part.ENGRAM_TABLE:
            rows = -(-spec.shape[0] // alignment) * alignment // num_ranks
            # One rank holds the table as stored: it is mapped, so padding would cost a copy.
            table_bytes += spec.bytes if num_ranks == 1 else rows * spec.shape[1] * spec.storage.bytes
        else:
            replicated_bytes += spec.bytes
    return RankReport(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_draft_experts=num_draft_experts,
        expert_bytes=expert_bytes,
        engram_table_bytes=table_bytes,
        replicated_bytes=replicated_bytes,
    )


def _amounts(keyed: Iterable[tuple[Key, TensorSpec]]) -> dict[Key, Amount]:
    groups: defaultdict[Key, list[TensorSpec]] = defaultdict(list)
    for key, spec in keyed:
        groups[key].append(spec)
    return {
        key: Amount(
            tensors=len(specs),
            parameters=sum(spec.parameters for spec in specs),
            bytes=sum(spec.bytes for spec in specs),
        )
        for key, specs in groups.items()
    }
