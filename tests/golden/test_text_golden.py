"""The backbone against recorded forwards: end to end without activation casts, module by module with them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from shoal_kernels.ops import indexer
from shoal_kernels.precision import EXACT, KV, SERVED, Precision
from shoal_model.model import Model
from shoal_model.rows import RowBatch, Segment, StepLimits, plan_step
from shoal_model.sequence import SequenceRun
from shoal_model.state import StateSlots
from shoal_model.trace import Recorder
from support.tiny_model import BACKTRACK, WINDOW, golden, normed, tiny_model
from torch import Tensor

END_TO_END = [("text_exact", EXACT, 2e-6), ("text_kv", KV, 5e-5)]
LIMITS = StepLimits(num_blocks=9, vocab_size=512, max_positions=4096)
NOT_TRACED = (".gate", "index_scores", "main_kv", "index_k", "token_map", "features")


@cache
def recorded(precision: Precision) -> tuple[Model, dict[str, Tensor]]:
    name = next(name for name, of, _ in END_TO_END if of is precision)
    ids = golden(name)["ids"].tolist()
    model, recorder = tiny_model(precision), Recorder()
    run = SequenceRun(model, slot=0, block_table=[3])
    hidden = run.run(ids, range(len(ids)), recorder)
    return model, {**recorder.values, "logits": model.logits(hidden)}


@pytest.mark.parametrize(("name", "precision", "tolerance"), END_TO_END)
def test_every_recorded_intermediate_is_reproduced(name: str, precision: Precision, tolerance: float) -> None:
    _, values = recorded(precision)
    compared = 0
    for key, expected in golden(name).items():
        if key == "ids" or key.endswith(NOT_TRACED):
            continue
        got = values[key].to(expected.dtype)
        if expected.is_floating_point():
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=key)
        else:
            assert torch.equal(got, expected), key
        compared += 1
    assert compared > 150


@pytest.mark.parametrize(("name", "precision", "tolerance"), END_TO_END)
def test_features_of_the_rows_that_stay_in_the_ring_are_reproduced(
    name: str, precision: Precision, tolerance: float
) -> None:
    _, values = recorded(precision)
    kept = WINDOW + BACKTRACK
    expected = golden(name)["dspark.features"][-kept:]
    torch.testing.assert_close(values["dspark.features"].to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "precision", "tolerance"), END_TO_END)
@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (4, 2), (6, 1)])
def test_cached_entries_are_reproduced(
    name: str, precision: Precision, tolerance: float, layer: int, ratio: int
) -> None:
    model, _ = recorded(precision)
    for kind, rows in (("main_kv", model.cache.pages.main(layer)), ("index_k", model.cache.pages.index(layer))):
        expected = golden(name)[f"layers.{layer}.{kind}"]
        count = 48 // ratio
        got = rows.read(torch.full((count,), 3), torch.arange(count)).to(expected.dtype)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "precision", "tolerance"), END_TO_END)
@pytest.mark.parametrize(("layer", "source", "ratio"), [(2, 2, 2), (4, 4, 2), (6, 6, 1), (8, 6, 1)])
def test_index_scores_are_reproduced(
    name: str, precision: Precision, tolerance: float, layer: int, source: int, ratio: int
) -> None:
    model, values = recorded(precision)
    expected = golden(name)[f"layers.{layer}.index_scores"]
    got = indexer.scores(
        values[f"layers.{layer}.index_q"],
        values[f"layers.{layer}.index_weights"],
        model.cache.pages.index(source),
        torch.tensor([[3]], dtype=torch.int32),
        torch.zeros(48, dtype=torch.int32),
        (torch.arange(48) + 1) // ratio,
        precision=precision,
    )
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=tolerance, atol=10 * tolerance)


def test_served_rounding_is_reproduced_module_by_module() -> None:
    expected = golden("text_sim")
    model = tiny_model(SERVED)
    recorder = Recorder()
    step = plan_step(one_segment(len(expected["ids"])), reserved(model), window=WINDOW, ratios=(1, 2), limits=LIMITS)
    assert step.decoder is not None
    selected = None
    for layer in model.backbone.layers:
        number = layer.plan.layer
        half = step.encoder if layer.plan.is_encoder else step.decoder
        given = layer.prepare(normed(expected[f"layers.{number}.attn_in"], SERVED), step)
        _, selected = layer.attend(given, half, step.block_table, selected, recorder)
        layer.feed_forward(expected[f"layers.{number}.ffn_in"], recorder)
        for name in ("topk", "candidate_blocks", "ffn.expert_ids"):
            key = f"layers.{number}.{name}"
            if key in expected:
                assert torch.equal(recorder.values[key].to(torch.int64), expected[key]), key
        for name in ("window_kv", "attn_out", "ffn_out"):
            assert_nearly_all_equal(recorder.values[f"layers.{number}.{name}"], expected[f"layers.{number}.{name}"])


def one_segment(length: int) -> RowBatch:
    segment = Segment(slot=0, block_table=[3], start=0, token_ids=[0] * length, lookback=[2, 2, 2])
    return RowBatch(segments=(segment,))


def reserved(model: Model) -> StateSlots:
    model.cache.state.reserve(64)
    return model.cache.state


def assert_nearly_all_equal(got: Tensor, want: Tensor) -> None:
    """Sums in another order flip single bfloat16 and FP8 roundings, no more than that."""
    error = float((got - want).norm() / want.norm())
    assert error < 5e-3, f"relative error {error:.2e}"
