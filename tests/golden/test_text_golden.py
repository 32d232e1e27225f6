"""The backbone against recorded forwards: end to end without activation casts, module by module with them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from shoal_kernels.ops import indexer
from shoal_kernels.precision import EXACT, KV, SERVED, Precision
from shoal_model.model import Model
from shoal_model.sequence import SequenceRun
from shoal_model.trace import Recorder
from support.tiny_model import BACKTRACK, WINDOW, golden, tiny_model
from torch import Tensor

END_TO_END = [("text_exact", EXACT, 2e-6), ("text_kv", KV, 5e-5)]
NOT_TRACED = ("gate", "index_scores", "main_kv", "index_k", "token_map", "ids", "features")


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
        if key.endswith(NOT_TRACED):
            continue
        got = values[key].to(expected.dtype)
        if expected.is_floating_point():
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")
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


class Replaced(Recorder):
    """Records what the model computes while every module is fed the recorded input."""


def test_served_rounding_is_reproduced_module_by_module() -> None:
    expected = golden("text_sim")
    model = tiny_model(SERVED)
    outputs = model_outputs_from_recorded_inputs(model, expected)
    for key, got in outputs.items():
        want = expected[key].to(got.dtype)
        error = (got - want).norm() / want.norm()
        assert error < 5e-3, f"{key}: relative error {error:.2e}"
    assert len(outputs) == 2 * model.config.num_hidden_layers
