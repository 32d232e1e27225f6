"""The shipped checkpoint: layout, size, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shoal_nano
import torch
from safetensors import safe_open
from shoal_nano.engram import engram_layout
from shoal_nano.released import read_release, released_tensors
from shoal_nano.tokenizer import LEADING, TRAILING, compressed_ids
from tokenizers import Tokenizer

RELEASE = Path(shoal_nano.__file__).parent / "release"
MAX_BYTES = 14_000_000


def test_the_shipped_files_stay_within_fourteen_megabytes() -> None:
    assert sum(path.stat().st_size for path in RELEASE.iterdir()) <= MAX_BYTES


def test_the_shard_holds_exactly_the_indexed_tensors_in_the_released_storage_types() -> None:
    index = json.loads((RELEASE / "model.safetensors.index.json").read_text())
    shard = safe_open(RELEASE / "model-00001-of-00001.safetensors", framework="pt")
    assert set(shard.keys()) == set(index["weight_map"])
    expert = shard.get_tensor("layers.0.ffn.experts.0.w1.weight")
    assert expert.dtype == torch.int8
    assert shard.get_tensor("layers.0.ffn.experts.0.w1.scale").dtype == torch.float8_e8m0fnu
    assert shard.get_tensor("layers.0.attn.wq_a.weight").dtype == torch.float8_e4m3fn
    assert shard.get_tensor("layers.0.hc_attn_fn").dtype == torch.float32
    assert shard.get_tensor("embed.weight").dtype == torch.bfloat16
    assert "layers.4.attn.compressor.wgate.weight" not in shard.keys()  # noqa: SIM118
    assert not any(name.startswith(("vision", "aligner", "image")) for name in shard.keys())  # noqa: SIM118


def test_encoding_the_decoded_release_gives_the_same_bytes() -> None:
    config, parameters = read_release(RELEASE)
    shard = safe_open(RELEASE / "model-00001-of-00001.safetensors", framework="pt")
    for name, tensor in released_tensors(parameters, config).items():
        stored = shard.get_tensor(name)
        if name.endswith(".scale") or f"{name.removesuffix('weight')}scale" in shard.keys():  # noqa: SIM118
            continue
        assert torch.equal(tensor, stored), name


def test_the_config_agrees_with_the_tokenizer_and_the_tables() -> None:
    config, parameters = read_release(RELEASE)
    tokenizer = Tokenizer.from_file(str(RELEASE / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert [tokenizer.token_to_id(token) for token in LEADING] == list(range(len(LEADING)))
    assert all(tokenizer.token_to_id(token) is not None for token in TRAILING)
    assert max(compressed_ids(tokenizer)) + 1 == config.engram_compressed_vocab_size
    assert tokenizer.token_to_id("<｜System｜>") == config.dspark_noise_token_id
    for e, rows in enumerate(engram_layout(config).rows):
        assert parameters[f"engram.embed.{e}"].shape == (rows, config.engram_head_dim)


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1024\n", "naïve café", "a  b\t\n\n12 345"])
def test_plain_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(RELEASE / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
