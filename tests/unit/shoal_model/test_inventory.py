"""The inventory sums to what the release publishes and matches the golden checkpoint name by name."""

from __future__ import annotations

from dataclasses import replace

from shoal_model.config import ModelConfig
from shoal_model.inventory import build_inventory
from shoal_model.shard_header import read_shard_header
from support.checkpoints import FIRST_SHARD, RELEASED_CONFIG, SECOND_SHARD, TINY


def test_the_release_has_its_published_tensors_parameters_and_bytes() -> None:
    specs = build_inventory(ModelConfig.load(RELEASED_CONFIG.parent)).values()
    assert len(specs) == 96_085
    assert sum(spec.parameters for spec in specs) == 763_205_315_794
    assert sum(spec.bytes for spec in specs) == 510_286_023_000


def test_a_plain_released_layer_has_2334_tensors() -> None:
    specs = build_inventory(ModelConfig.load(RELEASED_CONFIG.parent)).values()
    assert sum(spec.layer == 0 for spec in specs) == 2_334


def test_the_golden_checkpoint_holds_exactly_the_inventory() -> None:
    stored = {**read_shard_header(TINY / FIRST_SHARD), **read_shard_header(TINY / SECOND_SHARD)}
    specs = build_inventory(ModelConfig.load(TINY))
    assert {name: (spec.shape, spec.storage) for name, spec in specs.items()} == {
        name: (tensor.shape, tensor.storage) for name, tensor in stored.items()
    }


def test_a_text_only_model_has_no_image_tensors() -> None:
    config = ModelConfig.load(TINY)
    names = set(build_inventory(config)) - set(build_inventory(replace(config, vision=None)))
    assert {name.split(".")[0] for name in names} == {
        "vision",
        "aligner",
        "image_start",
        "image_end",
        "image_newline",
    }


def test_a_model_without_engram_or_draft_head_has_none_of_their_tensors() -> None:
    names = build_inventory(replace(ModelConfig.load(TINY), engram=None, dspark=None))
    assert not [name for name in names if "engram" in name or name.startswith("mtp.")]
