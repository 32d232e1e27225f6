"""Loaded weights equal the stored numbers, in the order their fields promise; nothing is read twice or needlessly."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from shoal_kernels.ops.engram import hash_rows
from shoal_model.checkpoint import INDEX_NAME, Checkpoint
from shoal_model.errors import CheckpointError
from shoal_model.inventory import Part
from shoal_model.load_weights import load_weights
from shoal_model.tensor_reader import TensorReader
from shoal_model.weights import BackboneWeights
from support.checkpoints import DATA, FIRST_SHARD, SECOND_SHARD, TINY, Json, copy_tiny, edit_json, remove_tensors
from support.sparse_tables import write_sparse_tables
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@cache
def stored() -> dict[str, Tensor]:
    return {**load_file(TINY / FIRST_SHARD), **load_file(TINY / SECOND_SHARD)}


@cache
def loaded() -> BackboneWeights:
    return load_weights(Checkpoint.open(TINY))


def fp8(name: str) -> Tensor:
    """A stored FP8 matrix as float32 [out, in], decoded by torch's own types."""
    weight, scale = stored()[f"{name}.weight"].float(), stored()[f"{name}.scale"].float()
    return weight * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]


def fp4(name: str) -> Tensor:
    packed = stored()[f"{name}.weight"].view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    return E2M1[codes] * stored()[f"{name}.scale"].float().repeat_interleave(32, 1)


def bf16(name: str) -> Tensor:
    return stored()[f"{name}.weight"].float()


def test_the_query_and_window_projections_are_joined_in_that_order() -> None:
    want = torch.cat([fp8("layers.0.attn.wq_a"), fp8("layers.0.attn.wkv")])
    assert torch.equal(loaded().layers[0].attn.wq_a_wkv.data[0].t(), want)


def test_the_index_query_follows_the_query_on_layers_with_an_indexer() -> None:
    want = torch.cat([fp8("layers.8.attn.wq_b"), fp8("layers.8.attn.indexer.wq_b")])
    assert torch.equal(loaded().layers[8].attn.wq_b.data[0].t(), want)
    assert torch.equal(loaded().layers[9].attn.wq_b.data[0].t(), fp8("layers.9.attn.wq_b"))


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (2, ["compressor.wgate", "compressor.wkv", "indexer.weights_proj"]),
        (6, ["compressor.wkv", "indexer.weights_proj"]),
        (8, ["indexer.weights_proj"]),
    ],
)
def test_gate_value_and_index_weights_are_joined_as_far_as_the_layer_has_them(layer: int, names: list[str]) -> None:
    weight = loaded().layers[layer].attn.compress_index
    assert weight is not None
    assert not weight.quantised
    assert torch.equal(weight.data[0].t(), torch.cat([bf16(f"layers.{layer}.attn.{name}") for name in names]))


def test_only_full_layers_have_a_compressor_norm_and_index_keys() -> None:
    layers = loaded().layers
    assert [i for i, layer in enumerate(layers) if layer.attn.compressor_norm is not None] == [2, 4, 6]
    assert [i for i, layer in enumerate(layers) if layer.attn.index_key is not None] == [2, 4, 6]
    assert [i for i, layer in enumerate(layers) if layer.attn.compress_index is not None] == [2, 4, 6, 8]


def test_each_output_group_holds_its_own_rows() -> None:
    whole, grouped = fp8("layers.3.attn.wo_a"), loaded().layers[3].attn.wo_a
    assert grouped.groups == 2
    for group, rows in enumerate(whole.chunk(2)):
        assert torch.equal(grouped.data[group].t(), rows)


def test_experts_hold_gate_then_up_and_down() -> None:
    experts = loaded().layers[5].ffn.experts
    for expert in range(8):
        w1, w3, w2 = (fp4(f"layers.5.ffn.experts.{expert}.{name}") for name in ("w1", "w3", "w2"))
        assert torch.equal(experts.gate_up[expert].t(), torch.cat([w1, w3]))
        assert torch.equal(experts.down[expert].t(), w2)


def test_the_shared_expert_holds_gate_then_up_and_down() -> None:
    shared = loaded().layers[5].ffn.shared
    w1, w3, w2 = (fp8(f"layers.5.ffn.shared_experts.{name}") for name in ("w1", "w3", "w2"))
    assert torch.equal(shared.gate_up[0].t(), torch.cat([w1, w3]))
    assert torch.equal(shared.down[0].t(), w2)


def test_the_draft_head_is_loaded_from_its_first_and_last_block() -> None:
    draft = loaded().draft
    assert draft is not None
    assert [block.ffn.experts.num_experts for block in draft.blocks] == [4, 4, 4]
    assert torch.equal(draft.main_proj.data[0].t(), fp8("mtp.0.main_proj"))
    assert torch.equal(draft.markov_embed, stored()["mtp.2.markov_head.embed.weight"])
    assert torch.equal(draft.markov_head.data[0].t(), bf16("mtp.2.markov_head.head"))
    assert torch.equal(draft.confidence.data[0].t(), bf16("mtp.2.confidence_head.proj"))


def test_vectors_and_hyper_connections_are_float32_of_the_stored_values() -> None:
    layer = loaded().layers[7]
    assert torch.equal(layer.attn.q_norm, bf16("layers.7.attn.q_norm"))
    assert torch.equal(layer.hc_ffn.fn.t(), stored()["layers.7.hc_ffn_fn"])
    assert torch.equal(layer.ffn.bias_vl, stored()["layers.7.ffn.gate.bias_vl"])
    assert layer.attn_norm.dtype == torch.float32


def test_engram_tables_hold_the_stored_bytes_where_any_row_can_be_looked_up() -> None:
    engram = loaded().layers[1].engram
    assert engram is not None
    assert torch.equal(engram.table.data, stored()["layers.1.engram.embed.weight"].view(torch.uint8))
    assert torch.equal(engram.table.scales, stored()["layers.1.engram.embed.scale"].view(torch.uint8))


@pytest.mark.parametrize("layer", [1, 4])
def test_golden_engram_rows_follow_from_token_ids(layer: int) -> None:
    with safe_open(DATA / "text_exact.safetensors", "pt") as golden:
        ids, want = golden.get_tensor("ids"), golden.get_tensor(f"layers.{layer}.engram.rows")
    weights, engram = loaded(), loaded().layers[layer].engram
    assert weights.compressed_ids is not None
    assert engram is not None
    pad = int(weights.compressed_ids[2])
    padded = torch.cat([torch.full((3,), pad), weights.compressed_ids[ids]])
    lookback = padded.unfold(0, 4, 1).flip(1)
    is_image = torch.zeros(lookback.shape, dtype=torch.bool)
    assert torch.equal(hash_rows(lookback, is_image, engram.multipliers, engram.primes, engram.offsets, pad), want)


def drop(directory: Path, prefixes: tuple[str, ...]) -> None:
    """Remove all tensors whose names start with one of `prefixes`."""
    names = {name for name in stored() if name.startswith(prefixes)}
    for shard in (FIRST_SHARD, SECOND_SHARD):
        remove_tensors(directory / shard, names)
    edit_json(
        directory / INDEX_NAME,
        lambda index: index.update(weight_map={n: s for n, s in index["weight_map"].items() if n not in names}),
    )
    edit_json(directory / INDEX_NAME, lambda index: index.pop("metadata"))


def test_a_text_only_checkpoint_loads(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)
    drop(directory, ("vision.", "aligner.", "image_"))
    edit_json(directory / "config.json", lambda config: config.pop("vision_config"))
    assert torch.equal(load_weights(Checkpoint.open(directory)).embed, loaded().embed)


def test_a_checkpoint_without_engram_and_draft_head_loads(tmp_path: Path) -> None:
    directory = copy_tiny(tmp_path)
    drop(directory, ("mtp.", "layers.1.engram.", "layers.4.engram."))

    def reduce(config: Json) -> None:
        text = config["text_config"]
        text["compress_ratios"] = text["compress_ratios"][:10]
        for name in [n for n in text if n.startswith(("dspark_", "engram_", "num_nextn_"))]:
            del text[name]

    edit_json(directory / "config.json", reduce)
    weights = load_weights(Checkpoint.open(directory))
    assert weights.draft is None
    assert weights.compressed_ids is None
    assert not any(layer.engram for layer in weights.layers)


def test_image_tensors_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    take = TensorReader.take

    def record(self: TensorReader, name: str) -> Tensor:
        taken.append(name)
        return take(self, name)

    monkeypatch.setattr(TensorReader, "take", record)
    checkpoint = Checkpoint.open(TINY)
    load_weights(checkpoint)
    unread = {Part.VISION, Part.ENGRAM_TABLE}
    assert sorted(taken) == sorted(n for n, place in checkpoint.tensors.items() if place.spec.part not in unread)


def test_a_tensor_left_unread_is_noticed() -> None:
    reader = TensorReader(Checkpoint.open(TINY))
    with pytest.raises(AssertionError, match=r"embed\.weight and 1015 more were not read"):
        reader.finish()


def test_a_tensor_is_handed_out_once() -> None:
    reader = TensorReader(Checkpoint.open(TINY))
    reader.take("norm.weight")
    with pytest.raises(AssertionError, match=r"norm\.weight is read twice"):
        reader.take("norm.weight")


@pytest.mark.parametrize("kept_bytes", [0, 50_000])
def test_a_shard_cut_short_after_the_check_is_named(tmp_path: Path, kept_bytes: int) -> None:
    checkpoint = Checkpoint.open(copy_tiny(tmp_path))
    with (checkpoint.directory / FIRST_SHARD).open("r+b") as file:
        file.truncate(kept_bytes)
    with pytest.raises(CheckpointError, match=rf"{FIRST_SHARD}: (was cut short|cannot be mapped)"):
        load_weights(checkpoint)


def test_a_table_cut_short_after_the_check_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(copy_tiny(tmp_path))
    name = "layers.1.engram.embed.weight"
    checkpoint.tensors[name].path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"cannot be mapped for {name}"):
        TensorReader(checkpoint).take_mapped(name)


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Path]:
    """The tiny model with 5 GB of Engram tables that take no room on disk."""
    directory = copy_tiny(tmp_path)
    yield directory
    for path in directory.iterdir():
        path.unlink()


def test_tables_far_larger_than_memory_use_are_mapped_not_read(sparse: Path) -> None:
    write_sparse_tables(sparse, vocab_size=12_000_000)
    checkpoint = Checkpoint.open(sparse)
    table_bytes = sum(p.spec.bytes for p in checkpoint.tensors.values() if p.spec.part is Part.ENGRAM_TABLE)
    assert table_bytes > 4 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engram = load_weights(checkpoint).layers[4].engram
    assert engram is not None
    assert engram.table.data[[0, 36_000_000, -1]].sum() == 0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 << 10


def test_released_size_tables_are_addressed_beyond_32_bits(sparse: Path) -> None:
    write_sparse_tables(sparse, vocab_size=12_000_000)
    checkpoint = Checkpoint.open(sparse)
    last = checkpoint.tensors["layers.4.engram.embed.weight"]
    with last.path.open("r+b") as file:
        file.seek(last.offset + last.spec.bytes - 1)
        file.write(b"\x38")
    engram = load_weights(checkpoint).layers[4].engram
    assert engram is not None
    assert int(engram.table.data[-1, -1]) == 0x38
