"""The description of a checkpoint, from config and index alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from shoal_model.checkpoint import INDEX_NAME
from shoal_model.config import ModelConfig
from shoal_model.errors import CheckpointError
from shoal_model.inspect import CheckpointReport, cache_report, inspect_checkpoint, rank_report
from shoal_model.inventory import Part, StorageType, build_inventory
from support.checkpoints import TINY, copy_tiny, edit_index, edit_json, write_released_index


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> CheckpointReport:
    return inspect_checkpoint(write_released_index(tmp_path_factory.mktemp("released")), num_ranks=32)


def test_the_release_is_described_without_its_shards(released: CheckpointReport) -> None:
    assert (released.num_shards, released.num_shards_present) == (40, 0)
    assert released.total.tensors == 96_085
    assert released.total.parameters == 763_205_315_794
    assert released.total.bytes == 510_286_023_000


def test_parts_formats_and_layers_each_cover_all_tensors(released: CheckpointReport) -> None:
    total = released.total
    assert sum(amount.bytes for amount in released.parts.values()) == total.bytes
    assert sum(amount.parameters for amount in released.formats.values()) == total.parameters
    in_blocks = sum(layer.amount.tensors for layer in released.layers) + sum(b.tensors for b in released.draft_blocks)
    # Outside layers and blocks: embedding, head, last norm, and the image tensors.
    assert in_blocks + 3 + released.parts[Part.VISION].tensors == total.tensors


def test_released_context_costs_890_bytes_a_token(released: CheckpointReport) -> None:
    assert released.cache.kv_bytes_per_token == 890
    assert released.cache.window_row_bytes == 528
    assert released.cache.snapshot_bytes == 1_351_680


def test_one_rank_of_32_holds_its_share_of_experts_and_table_rows(released: CheckpointReport) -> None:
    rank = released.rank
    assert (rank.num_experts, rank.num_draft_experts) == (12, 4)
    expert_bytes = 2 * 2304 * (2560 + 160) + 5120 * (1152 + 72)
    assert rank.expert_bytes == expert_bytes * (40 * 12 + 3 * 4)
    rows = [-(-n // 256) * 256 // 32 for n in (384006168, 384016682)]
    assert rank.engram_table_bytes == sum(rows) * 264
    divided = released.parts[Part.EXPERTS].bytes + released.parts[Part.ENGRAM_TABLE].bytes
    assert rank.replicated_bytes == released.total.bytes - divided


def test_a_single_rank_holds_everything() -> None:
    report = inspect_checkpoint(TINY)
    assert report.rank.bytes == report.total.bytes == 4_774_802


def test_the_fullest_rank_is_described_when_experts_do_not_divide_evenly() -> None:
    config = ModelConfig.load(TINY)
    rank = rank_report(config, build_inventory(config).values(), 3)
    assert (rank.num_experts, rank.num_draft_experts) == (3, 2)


@pytest.mark.parametrize("num_ranks", [0, -1, 9])
def test_a_group_larger_than_the_experts_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="ranks must be between 1 and 8"):
        inspect_checkpoint(TINY, num_ranks=num_ranks)


def test_present_shards_are_checked(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)
    next(directory.glob("*-00002.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        inspect_checkpoint(directory)


def test_engram_tables_that_contradict_their_primes_are_refused(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)
    edit_json(directory / "config.json", lambda c: c["text_config"].update(engram_vocab_size=201))
    edit_json(directory / "config.json", lambda c: c["text_config"].update(engram_num_embeddings=[1362, 1553]))
    with pytest.raises(CheckpointError, match="engram_num_embeddings of layer 4"):
        inspect_checkpoint(directory)


@pytest.mark.long
def test_a_released_tensor_missing_in_the_index_is_named(tmp_path: Path) -> None:
    directory = write_released_index(tmp_path, prefix="model.")
    edit_index(directory, lambda names: names.pop("model.layers.39.ffn.experts.383.w2.scale"))
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(directory)
    assert str(caught.value) == f"{directory / INDEX_NAME}: layers.39.ffn.experts.383.w2.scale is missing"


def test_tiny_sizes_follow_its_config() -> None:
    report = inspect_checkpoint(TINY)
    # (32 + 4 + 32 + 2) bytes an entry: two owners of ratio 2 and one of ratio 1.
    assert report.cache.kv_bytes_per_token == 140
    assert cache_report(report.config).snapshot_bytes == 6 * 16 * 66
    assert report.formats[StorageType.F8_E8M0].parameters == 0


def test_inspection_needs_no_torch() -> None:
    code = "import sys, shoal_model.inspect, shoal_model.revision, shoal_cli.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
