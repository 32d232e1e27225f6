"""The weights' name changes with what changes tokens or cached bytes, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_model.checkpoint import INDEX_NAME, Checkpoint
from shoal_model.errors import CheckpointError
from shoal_model.revision import WeightsRevision, weights_revision
from support.checkpoints import TINY, copy_tiny, edit_json

GOLDEN = weights_revision(Checkpoint.open(TINY))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return copy_tiny(tmp_path)


def change_byte(directory: Path, tensor: str, place: int) -> None:
    location = Checkpoint.open(directory).tensors[tensor]
    with location.path.open("r+b") as file:
        file.seek(location.offset + place)
        (byte,) = file.read(1)
        file.seek(location.offset + place)
        file.write(bytes([byte ^ 1]))


def revision(directory: Path, **options: int) -> WeightsRevision:
    return weights_revision(Checkpoint.open(directory), **options)


def test_a_copy_elsewhere_has_the_same_revision(directory: Path) -> None:
    assert revision(directory) == GOLDEN


def test_names_and_layout_of_files_do_not_matter(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(json.loads((directory / "config.json").read_text())))
    shards = sorted(directory.glob("*.safetensors"))
    for number, shard in enumerate(shards):
        shard.rename(directory / f"part-{number}.safetensors")
    names = {shard.name: f"part-{number}.safetensors" for number, shard in enumerate(shards)}
    edit_json(
        directory / INDEX_NAME,
        lambda index: index.update(weight_map={n: names[shard] for n, shard in index["weight_map"].items()}),
    )
    assert revision(directory) == GOLDEN


@pytest.mark.parametrize("tensor", ["layers.3.ffn.experts.7.w1.scale", "layers.4.engram.embed.weight", "norm.weight"])
def test_one_changed_byte_of_the_backbone_changes_the_weights_only(directory: Path, tensor: str) -> None:
    change_byte(directory, tensor, 0)
    changed = revision(directory)
    assert changed.weights != GOLDEN.weights
    assert changed.draft == GOLDEN.draft


def test_one_changed_byte_of_the_draft_head_changes_the_draft_only(directory: Path) -> None:
    change_byte(directory, "mtp.1.attn.wq_a.weight", 100)
    changed = revision(directory)
    assert changed.weights == GOLDEN.weights
    assert changed.draft != GOLDEN.draft


def test_another_tokenizer_changes_the_weights_only(directory: Path) -> None:
    with (directory / "tokenizer.json").open("a") as file:
        file.write("\n")
    changed = revision(directory)
    assert changed.weights != GOLDEN.weights
    assert changed.draft == GOLDEN.draft


def test_a_changed_config_value_changes_the_weights(directory: Path) -> None:
    edit_json(directory / "config.json", lambda config: config["text_config"].update(swiglu_limit=7.0))
    assert revision(directory).weights != GOLDEN.weights


def test_a_large_checkpoint_is_sampled_and_says_so(directory: Path) -> None:
    sampled = revision(directory, full_content_bytes=0)
    assert sampled.weights != GOLDEN.weights
    change_byte(directory, "norm.weight", 128)
    assert revision(directory, full_content_bytes=0).weights != sampled.weights


def test_a_sample_reads_the_middle_of_large_tensors(directory: Path) -> None:
    sampled = revision(directory, full_content_bytes=0)
    middle = Checkpoint.open(directory).tensors["embed.weight"].spec.bytes // 2
    change_byte(directory, "embed.weight", 0)
    assert revision(directory, full_content_bytes=0) == sampled
    change_byte(directory, "embed.weight", middle)
    assert revision(directory, full_content_bytes=0).weights != sampled.weights


def test_a_missing_tokenizer_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        revision(directory)


def test_a_file_cut_short_meanwhile_is_named(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    for shard in directory.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:60_000])
    with pytest.raises(CheckpointError, match="was cut short while"):
        weights_revision(checkpoint)
