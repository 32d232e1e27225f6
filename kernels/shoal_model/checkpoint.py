"""Where every tensor of a checkpoint lies, checked before a byte of data is read.

A checkpoint is a folder with `config.json`, `model.safetensors.index.json`, its shards and `tokenizer.json`. Names are
accepted with and without a `model.` prefix and are used without it. Source: v41-flash specification, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_model.config import ModelConfig
from shoal_model.errors import CheckpointError
from shoal_model.inventory import TensorSpec, build_inventory
from shoal_model.json_fields import Fields, read_object
from shoal_model.shard_header import StoredTensor, read_shard_header

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """A checked tensor: `spec.bytes` bytes at `offset` of the file `path`."""

    spec: TensorSpec
    path: Path
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """The index, checked against the inventory: exactly its names, each in one shard."""

    path: Path
    shard_of: Mapping[str, str]
    """File name by tensor name (without prefix)."""

    @property
    def shards(self) -> tuple[str, ...]:
        """File names, sorted."""
        return tuple(sorted(set(self.shard_of.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every tensor has been found with the right shape and type."""

    directory: Path
    config: ModelConfig
    index: CheckpointIndex
    tensors: Mapping[str, TensorLocation]

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read config, index and shard headers. Raises CheckpointError naming the field, tensor or shard at fault."""
        directory = Path(directory)
        config = ModelConfig.load(directory)
        inventory = build_inventory(config)
        index = read_index(directory, inventory)
        return cls(directory=directory, config=config, index=index, tensors=locate_tensors(index, inventory))


def read_index(directory: Path, inventory: Mapping[str, TensorSpec]) -> CheckpointIndex:
    """Read the index and compare its names with the inventory. Raises CheckpointError."""
    path = directory / INDEX_NAME
    values = read_object(path)
    shard_of: dict[str, str] = {}
    for name, shard in Fields(values, path).strings("weight_map").items():
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise CheckpointError(path, f"{name} is in {shard!r}, which is not a file name")
        canonical = _canonical(name)
        if canonical in shard_of:
            raise CheckpointError(path, f"{canonical} is listed twice, with and without the model. prefix")
        shard_of[canonical] = shard
    _compare_names(path, shard_of, inventory)
    _check_total(values, path, inventory)
    return CheckpointIndex(path=path, shard_of=shard_of)


def locate_tensors(
    index: CheckpointIndex, inventory: Mapping[str, TensorSpec], *, absent_shards_allowed: bool = False
) -> Mapping[str, TensorLocation]:
    """Find every tensor through the shard headers, in the order of the inventory.

    absent_shards_allowed   leave out the tensors of shards that are not there, instead of refusing the checkpoint
    raises                  CheckpointError: a missing or broken shard; a tensor that is missing, unknown, misshapen, of
                            another type, or in another shard than the index says
    """
    found: dict[str, TensorLocation] = {}
    for shard in index.shards:
        path = index.path.parent / shard
        if not path.exists():
            if absent_shards_allowed:
                continue
            tensor = next(name for name, holder in index.shard_of.items() if holder == shard)
            raise CheckpointError(path, f"is missing; the index places {tensor} and others in it")
        found.update(_locate_in_shard(path, index, inventory))
    return {name: found[name] for name in inventory if name in found}


def _locate_in_shard(
    path: Path, index: CheckpointIndex, inventory: Mapping[str, TensorSpec]
) -> Mapping[str, TensorLocation]:
    found: dict[str, TensorLocation] = {}
    for stored_name, tensor in read_shard_header(path).items():
        name = _canonical(stored_name)
        holder = index.shard_of.get(name)
        if holder is None:
            raise CheckpointError(path, f"holds {name}, which is not in the index")
        if holder != path.name:
            raise CheckpointError(path, f"holds {name}, which the index places in {holder}")
        if name in found:
            raise CheckpointError(path, f"holds {name} twice, with and without the model. prefix")
        found[name] = _checked(path, tensor, inventory[name])
    for name, holder in index.shard_of.items():
        if holder == path.name and name not in found:
            raise CheckpointError(path, f"lacks {name}, which the index places in it")
    return found


def _checked(path: Path, tensor: StoredTensor, spec: TensorSpec) -> TensorLocation:
    if tensor.storage is not spec.storage:
        raise CheckpointError(
            path, f"{spec.name} has storage type {tensor.storage.value}, must be {spec.storage.value}"
        )
    if tensor.shape != spec.shape:
        raise CheckpointError(path, f"{spec.name} has shape {list(tensor.shape)}, must be {list(spec.shape)}")
    return TensorLocation(spec=spec, path=path, offset=tensor.offset)


def _canonical(name: str) -> str:
    return name.removeprefix("model.")


def _compare_names(path: Path, shard_of: Mapping[str, str], inventory: Mapping[str, TensorSpec]) -> None:
    for problem, names in (
        ("is missing", [name for name in inventory if name not in shard_of]),
        ("is unknown to this configuration", [name for name in shard_of if name not in inventory]),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(path, f"{names[0]}{others} {problem}")


def _check_total(values: Mapping[str, object], path: Path, inventory: Mapping[str, TensorSpec]) -> None:
    root = Fields(values, path)
    if not root.has("metadata") or not (metadata := root.section("metadata")).has("total_size"):
        return
    total, want = metadata.integer("total_size"), sum(spec.bytes for spec in inventory.values())
    if total != want:
        raise metadata.fail("total_size", f"must be {want} for this configuration, got {total}")
