"""Models of random weights: the share of a rank, and weights out of a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision
from shoal_model.config import ModelConfig
from shoal_model.device import DoesNotFit
from shoal_model.inventory import build_inventory
from shoal_model.layer_map import AttentionMode, build_layer_map
from shoal_model.model import Model
from shoal_model.released_sizes import released_share
from shoal_model.sequence import SequenceRun
from shoal_model.synthetic import Synthetic, check_weights, synthetic_weights, weight_bytes
from support.checkpoints import RELEASED_CONFIG
from support.tiny_model import TINY, text


def test_the_whole_model_of_one_rank_is_the_released_configuration() -> None:
    released = ModelConfig.from_fields(json.loads(RELEASED_CONFIG.read_text()))
    assert released_share(40, 1) == replace(released, vision=None)


@pytest.mark.parametrize("num_layers", [4, 5, 7, 13, 39])
def test_a_few_layers_are_of_every_kind_and_fit_together(num_layers: int) -> None:
    config = released_share(num_layers)
    layers = build_layer_map(config).layers
    modes = {plan.mode for plan in layers}
    assert len(layers) == num_layers
    assert {AttentionMode.SWA, AttentionMode.FULL} <= modes
    assert num_layers < 7 or modes == set(AttentionMode)
    assert {plan.ratio for plan in layers if plan.owns_kv} == {1, 2}
    assert any(plan.has_engram for plan in layers)
    assert all(plan.kv_source is not None and plan.index_source is not None for plan in layers if plan.ratio)
    assert layers[config.boundary].is_candidate_source
    assert any(plan.is_draft_target for plan in layers)


def test_at_64_ranks_six_experts_serve_every_row() -> None:
    config = released_share(4, 64)
    assert config.n_routed_experts == config.num_experts_per_tok == 6
    assert config.hidden_size == 5120


@pytest.mark.parametrize(("num_layers", "ep_size"), [(3, 64), (41, 64), (4, 0), (4, 7), (4, 128)])
def test_a_share_that_cannot_be_is_refused(num_layers: int, ep_size: int) -> None:
    with pytest.raises(ValueError, match=r"layers|ep_size"):
        released_share(num_layers, ep_size)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="released"):
        Synthetic(sizes="huge").config()


def test_equal_seeds_give_equal_models_and_sane_logits() -> None:
    config = ModelConfig.load(TINY)

    def logits(seed: int) -> torch.Tensor:
        weights = synthetic_weights(config, precision=SERVED, device=torch.device("cpu"), seed=seed)
        model = Model(config, weights, num_blocks=3, num_slots=1)
        return model.logits(SequenceRun(model, slot=0, block_table=[1]).run(text(8), range(8)))

    first = logits(1)
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
    assert torch.isfinite(first).all()
    assert 0.1 < float(first.std()) < 10.0
    assert len(build_inventory(config)) > 100


# Expert weights kept as bytes come in tiles, which those of this model do not fill.
@pytest.mark.parametrize(("precision", "least"), [(SERVED, 0.85), (SERVED_BF16, 0.6)])
def test_what_is_estimated_is_what_weights_take(precision: Precision, least: float) -> None:
    config = ModelConfig.load(TINY)
    weights = synthetic_weights(config, precision=precision, device=torch.device("cpu"), seed=1)
    taken = sum(part.numel() * part.element_size() for part in _tensors(weights))
    assert least * taken < sum(weight_bytes(config, precision)) < 1.15 * taken


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def test_weights_that_do_not_fit_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_model.device.free_host_bytes", lambda: 20 << 30)
    with pytest.raises(DoesNotFit, match=r"the weights of 40 layers need 6\d\.\d GiB"):
        Model.synthetic(Synthetic(), num_blocks=3, num_slots=1)
    check_weights(released_share(4), SERVED, torch.device("cpu"))
    # On an accelerator the host holds the Engram tables only.
    monkeypatch.setattr("shoal_model.device.free_bytes", lambda _: 10 << 30)
    with pytest.raises(DoesNotFit, match=r"layers need 1\d\.\d GiB, of the memory of device cuda:0"):
        check_weights(released_share(), SERVED_BF16, torch.device("cuda", 0))
    monkeypatch.setattr("shoal_model.device.free_bytes", lambda _: 20 << 30)
    monkeypatch.setattr("shoal_model.device.free_host_bytes", lambda: 1 << 30)
    with pytest.raises(DoesNotFit, match="the Engram tables need"):
        check_weights(released_share(), SERVED_BF16, torch.device("cuda", 0))
