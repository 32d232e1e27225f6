"""The layer map is the table of section 2 of the specification."""

from __future__ import annotations

from shoal_model.config import ModelConfig
from shoal_model.layer_map import AttentionMode, build_layer_map
from support.checkpoints import RELEASED_CONFIG, TINY

RELEASED = build_layer_map(ModelConfig.load(RELEASED_CONFIG.parent)).layers


def test_released_layers_have_their_modes() -> None:
    modes = {plan.layer: plan.mode for plan in RELEASED}
    assert [layer for layer, mode in modes.items() if mode is AttentionMode.SWA] == [0, 1]
    assert [layer for layer, mode in modes.items() if mode is AttentionMode.FULL] == [2, 8, 14, 20]
    assert [layer for layer, mode in modes.items() if mode is AttentionMode.REINDEX] == [24, 28, 32, 36]
    assert sum(mode is AttentionMode.REUSE for mode in modes.values()) == 30


def test_released_layers_take_kv_and_index_from_the_latest_source() -> None:
    sources = {plan.layer: (plan.kv_source, plan.index_source) for plan in RELEASED}
    assert sources[1] == (None, None)
    assert sources[7] == (2, 2)
    assert sources[13] == (8, 8)
    assert sources[23] == (20, 20)
    assert sources[24] == (20, 24)
    assert sources[39] == (20, 36)


def test_released_extras_sit_where_the_table_says() -> None:
    assert [plan.layer for plan in RELEASED if plan.has_engram] == [1, 14]
    assert [plan.layer for plan in RELEASED if plan.is_candidate_source] == [20]
    assert [plan.layer for plan in RELEASED if plan.is_draft_target] == [37, 38, 39]
    assert [plan.layer for plan in RELEASED if plan.has_indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert sum(plan.is_encoder for plan in RELEASED) == 20


def test_the_tiny_model_holds_every_kind_of_layer() -> None:
    layer_map = build_layer_map(ModelConfig.load(TINY))
    assert {plan.mode for plan in layer_map.layers} == set(AttentionMode)
    assert [plan.layer for plan in layer_map.kv_owners] == [2, 4, 6]
    assert layer_map.boundary == 6
