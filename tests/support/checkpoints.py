"""Checkpoints on disk for tests: the golden tiny one, copies to damage, and an index made from an inventory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal_model.checkpoint import INDEX_NAME
from shoal_model.config import ModelConfig
from shoal_model.inventory import build_inventory

DATA = Path(__file__).parents[1] / "golden" / "data"
TINY = DATA / "tiny"
# The config.json of DeepSeek-V4.1-Flash, written from its published field table.
RELEASED_CONFIG = DATA / "released" / "config.json"
FIRST_SHARD = "model-00001-of-00002.safetensors"
SECOND_SHARD = "model-00002-of-00002.safetensors"

Json = dict[str, Any]


def copy_tiny(directory: Path) -> Path:
    """A copy of the tiny checkpoint in `directory`/tiny, free to be damaged."""
    return Path(shutil.copytree(TINY, directory / "tiny"))


def edit_json(path: Path, edit: Callable[[Json], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def read_shard(path: Path) -> tuple[Json, bytes]:
    """Header and data of a shard."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path: Path, header: Json, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path: Path, edit: Callable[[Json], object]) -> None:
    header, data = read_shard(path)
    edit(header)
    write_shard(path, header, data)


def remove_tensors(path: Path, names: set[str]) -> None:
    """Rewrite a shard without some of its tensors."""
    header, data = read_shard(path)
    kept, kept_data, end = {}, [], 0
    for name, entry in header.items():
        if name == "__metadata__" or name in names:
            continue
        begin, stop = entry["data_offsets"]
        kept[name] = {**entry, "data_offsets": [end, end + stop - begin]}
        kept_data.append(data[begin:stop])
        end += stop - begin
    write_shard(path, kept, b"".join(kept_data))


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Edit the weight map of a checkpoint."""
    edit_json(directory / INDEX_NAME, lambda values: edit(values["weight_map"]))


def write_released_index(directory: Path, *, prefix: str = "") -> Path:
    """The released config with an index of all its tensors, and no shards."""
    shutil.copy(RELEASED_CONFIG, directory / "config.json")
    inventory = build_inventory(ModelConfig.load(directory))
    weight_map = {
        prefix + name: f"model-{3 + (spec.layer or 0):05}-of-00048.safetensors" for name, spec in inventory.items()
    }
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    return directory
