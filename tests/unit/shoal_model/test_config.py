"""The configuration is read strictly: what is missing, ill-typed or contradictory is refused by name."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_model.config import ModelConfig
from shoal_model.errors import CheckpointError
from support.checkpoints import RELEASED_CONFIG, TINY

RELEASED: dict[str, Any] = json.loads(RELEASED_CONFIG.read_text())
OPTIONAL = {"max_wh_ratio"}


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += leaves(value, (*path, name))
        elif name not in OPTIONAL:
            found.append((*path, name))
    return found


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    values = copy.deepcopy(RELEASED)
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return values


def text(**fields: object) -> dict[str, Any]:
    values = copy.deepcopy(RELEASED)
    values["text_config"].update(fields)
    return values


def test_the_released_config_is_read() -> None:
    config = ModelConfig.from_fields(RELEASED)
    assert (config.hidden_size, config.boundary, config.num_draft_blocks) == (5120, 20, 3)
    assert config.rms_norm_eps == 1e-20
    assert config.engram is not None
    assert (config.engram.columns, config.engram.width) == (24, 6144)
    assert config.dspark is not None
    assert config.dspark.target_layer_ids == (37, 38, 39)


def test_the_tiny_config_is_read() -> None:
    assert ModelConfig.load(TINY).boundary == 6


@pytest.mark.parametrize("path", leaves(RELEASED), ids=".".join)
def test_a_missing_field_is_named(path: tuple[str, ...]) -> None:
    values = changed(path, None)
    with pytest.raises(CheckpointError, match=rf"^config\.json: {path[0]}.*") as caught:
        ModelConfig.from_fields(values)
    assert ".".join(path) in caught.value.detail


@pytest.mark.parametrize("path", leaves(RELEASED), ids=".".join)
def test_a_field_of_another_type_is_named(path: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_fields(changed(path, {"surprise": True}))
    assert caught.value.detail.startswith(".".join(path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_bias": 0}, "attention_bias"),
        ({"hidden_size": 5121}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 5120.0}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"compress_rope_theta": 1}, "compress_rope_theta"),
        ({"rope_scaling": {**RELEASED["text_config"]["rope_scaling"], "beta_fast": 1}}, "rope_scaling.beta_fast"),
        ({"n_routed_experts": 10**9}, "n_routed_experts"),
        ({"engram_vocab_size": 10**18}, "engram_vocab_size"),
        ({"engram_n_heads": 10**9}, "engram_n_heads"),
        ({"o_groups": 7}, "o_groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok"),
        ({"compress_ratios": [0] * 43}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 20}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 19 + [2] + [0] * 3}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + [3] * 18 + [1] * 20 + [0] * 3}, "compress_ratios"),
        ({"kv_source_layer_ids": [1, 8, 14, 20]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 24]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 14, 8, 20]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 20, 24]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 10, 14, 20]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, "index_source_layer_ids"),
        ({"index_k_source_layer_ids": [2, 8, 14]}, "index_k_source_layer_ids"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id"),
        ({"engram_layer_ids": [1, 20]}, "engram_layer_ids"),
        ({"engram_num_embeddings": [384006168]}, "engram_num_embeddings"),
        ({"engram_head_dim": 250}, "engram_head_dim"),
        ({"engram_max_ngram_size": 3}, "engram_max_ngram_size"),
        ({"dspark_target_layer_ids": [19, 38, 39]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id"),
        ({"hc_shifted": False}, "hc_shifted"),
        ({"use_fp4_sparse_kv": False}, "use_fp4_sparse_kv"),
        ({"dspark_target_attn_input": False}, "dspark_target_attn_input"),
    ],
)
def test_a_contradiction_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_fields(text(**fields))
    assert caught.value.detail.startswith(f"text_config.{named}")


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        ModelConfig.from_fields(changed(("architectures",), ["DeepseekV4ForCausalLM"]))


def test_fields_absent_in_the_release_may_be_spelled_out() -> None:
    spelled = text(
        hc_shifted=True, use_fp4_sparse_kv=True, dspark_target_attn_input=True, index_k_source_layer_ids=[2, 8, 14, 20]
    )
    assert ModelConfig.from_fields(spelled) == ModelConfig.from_fields(RELEASED)


def test_a_text_only_model_has_no_vision_config() -> None:
    values = changed(("vision_config",), None)
    del values["image_token_id"]
    config = ModelConfig.from_fields(values)
    assert config.vision is None
    assert config.image_token_id is None


def test_a_model_without_a_draft_head_has_none_of_its_fields() -> None:
    values = text(compress_ratios=[0, 0] + [2] * 18 + [1] * 20)
    for name in list(values["text_config"]):
        if name.startswith("dspark_") or name == "num_nextn_predict_layers":
            del values["text_config"][name]
    assert ModelConfig.from_fields(values).dspark is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.load(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(path=st.sampled_from(leaves(RELEASED)), value=json_values)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_value_is_either_read_or_refused_with_the_typed_error(path: tuple[str, ...], value: object) -> None:
    with suppress(CheckpointError):
        assert ModelConfig.from_fields(changed(path, value)).boundary == 20
