"""The whole model in the precision of accelerators, on kernels in Triton's interpreter: what needs no GPU to be wrong.

Small layers, one of each kind, with random weights. On a device, tests/exactness and tests/golden run the tiny
checkpoint instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision
from shoal_kernels.row_formats import window_format
from shoal_model.config import ModelConfig
from shoal_model.model import Model
from shoal_model.rows import RowBatch
from shoal_model.sampler import RowChoice, RowSampling, SampleRow, sample
from shoal_model.sequence import SequenceRun
from shoal_model.synthetic import synthetic_weights
from shoal_model.weights import BackboneWeights
from support.on_device import HAS_DEVICE, relative_error
from support.tiny_model import TINY, text
from torch import Tensor

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="kernels are compiled here, not interpreted")
TOKENS = text(5)


@cache
def config() -> ModelConfig:
    """Sliding window with Engram, both kinds of KV owner; drafts read the last layer."""
    tiny = ModelConfig.load(TINY)
    assert tiny.engram is not None
    assert tiny.dspark is not None
    return replace(
        tiny,
        num_hidden_layers=3,
        compress_ratios=(0, 2, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        n_routed_experts=2,
        engram=replace(tiny.engram, layer_ids=(0,), num_embeddings=tiny.engram.num_embeddings[:1]),
        dspark=replace(tiny.dspark, num_blocks=1, target_layer_ids=(2,), n_routed_experts=2),
    )


@cache
def weights(precision: Precision) -> BackboneWeights:
    return synthetic_weights(config(), precision=precision, device=torch.device("cpu"), seed=1)


def small_model(precision: Precision = SERVED_BF16) -> Model:
    return Model(config(), weights(precision), precision=precision, num_blocks=5, num_slots=2)


@cache
def whole() -> tuple[Model, SequenceRun, Tensor]:
    """All tokens as one chunk."""
    model = small_model()
    run = SequenceRun(model, slot=0, block_table=[1])
    return model, run, run.run(TOKENS, range(len(TOKENS)))


def test_hidden_rows_are_near_those_of_the_host() -> None:
    """A flipped Q8 rounding moves a value by up to a sixteenth, and each layer casts what was flipped before."""
    _, _, hidden = whole()
    host = small_model(SERVED)
    expected = SequenceRun(host, slot=0, block_table=[1]).run(TOKENS, range(len(TOKENS)))
    assert hidden.dtype == torch.bfloat16
    assert relative_error(hidden, expected) < 0.1


@pytest.mark.long
def test_a_decode_step_after_a_chunk_gives_the_bits_of_one_chunk_in_another_slot() -> None:
    model, _, hidden = whole()
    run = SequenceRun(model, slot=1, block_table=[3])
    count = len(TOKENS) - 1
    assert torch.equal(run.run(TOKENS[:count], (count - 1,)), hidden[count - 1 : count])
    assert torch.equal(run.run(TOKENS[count:], (0,)), hidden[count:])
    cache = model.cache
    assert cache.read_entries(1, 4) == cache.read_entries(3, 4)
    layers = range(cache.encoder_layers.start, cache.draft_layers.stop)
    assert torch.equal(cache.read_window(0, layers, 0, 5), cache.read_window(1, layers, 0, 5))


def test_window_records_enter_a_slot_as_they_left_it_and_the_host_holds_what_they_stand_for() -> None:
    model, _, _ = whole()
    cache = model.cache
    records = cache.read_window(0, cache.encoder_layers, 0, 5)
    assert records.dtype == torch.uint8
    other, host = small_model().cache, small_model(SERVED).cache
    for target in (other, host):
        target.write_window(1, cache.encoder_layers, 0, records)
        assert torch.equal(target.read_window(1, cache.encoder_layers, 0, 5), records)
    values = window_format(config().head_dim, SERVED).decode(records)
    assert torch.equal(host.state.encoder.read(1, 0, 5), values)
    pair = cache.read_open_pair(0, 4)
    other.write_open_pair(1, 4, pair)
    assert torch.equal(other.read_open_pair(1, 4), pair)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_fused_head_chooses_what_its_logits_choose(temperature: float) -> None:
    model, _, hidden = whole()
    sampling = RowSampling(temperature=temperature)
    rows = [SampleRow(sampling=sampling, seed=i, output_index=i) for i in range(len(TOKENS))]
    chosen = model.choose(hidden, RowChoice.of(rows, model.device))
    assert torch.equal(chosen, sample(model.logits(hidden), rows).token_ids)


@pytest.mark.long
def test_drafts_and_mixed_steps_give_the_same_bits() -> None:
    model, first, hidden = whole()
    second = SequenceRun(model, slot=1, block_table=[2])
    second.run(TOKENS[:2], ())
    head = model.draft([first.anchor(7), second.anchor(8)])
    for run, base_logits in zip((first, second), head.base_logits, strict=True):
        assert torch.equal(model.draft([run.anchor(7 + run.slot)]).base_logits[0], base_logits)
    parts = second.segment(TOKENS[2:4], (0, 1)), first.segment([9], (0,))
    rows = model.forward(RowBatch(segments=parts)).hidden
    assert torch.equal(rows[:2], hidden[2:4])
    rejected = first.run([9, 11], (0, 1))
    assert torch.equal(rejected[:1], rows[2:])
