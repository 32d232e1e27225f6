"""Engram tables of any size as a sparse shard: all holes, no room on disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from shoal_model.config import ModelConfig
from shoal_model.engram_tables import search_primes
from shoal_model.inventory import Part, build_inventory
from support.checkpoints import FIRST_SHARD, SECOND_SHARD, Json, edit_index, edit_json, remove_tensors

SPARSE_SHARD = "model-00003-of-00003.safetensors"


def write_sparse_tables(directory: Path, *, vocab_size: int) -> None:
    """Give the tiny checkpoint in `directory` tables of about 6 x `vocab_size` rows, in their own shard."""
    edit_json(directory / "config.json", lambda config: _grow(config["text_config"], vocab_size, directory))
    specs = build_inventory(ModelConfig.load(directory)).values()
    tables = [spec for spec in specs if spec.part is Part.ENGRAM_TABLE]
    names = {spec.name for spec in tables}
    for shard in (FIRST_SHARD, SECOND_SHARD):
        remove_tensors(directory / shard, names)
    header: Json = {}
    end = 0
    for spec in tables:
        header[spec.name] = {
            "dtype": spec.storage.value,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.bytes],
        }
        end += spec.bytes
    text = json.dumps(header).encode()
    with (directory / SPARSE_SHARD).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    edit_index(directory, lambda weight_map: weight_map.update(dict.fromkeys(names, SPARSE_SHARD)))
    edit_json(directory / "model.safetensors.index.json", lambda index: index.pop("metadata"))


def _grow(text: Json, vocab_size: int, directory: Path) -> None:
    text["engram_vocab_size"] = vocab_size
    engram = ModelConfig.from_fields(
        {**json.loads((directory / "config.json").read_text()), "text_config": text}
    ).engram
    assert engram is not None
    text["engram_num_embeddings"] = [int(primes.sum()) for primes in search_primes(engram)]
