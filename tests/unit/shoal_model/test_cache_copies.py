"""Slots and blocks copied inside one cache: what n choices of one prompt begin with."""

import pytest
import torch
from shoal_model.model import Model
from shoal_model.rings import StaleRingRead
from shoal_model.sequence import SequenceRun
from support.tiny_model import text, tiny_model


def _run(tokens: list[int]) -> Model:
    model = tiny_model()
    SequenceRun(model, slot=0, block_table=[1, 2]).run(tokens, ())
    return model


def test_a_copied_slot_holds_every_ring_of_its_source() -> None:
    model = _run(text(41))
    model.cache.copy_slot(0, 3)
    for layers in (model.cache.encoder_layers, model.cache.decoder_layers, model.cache.draft_layers):
        assert torch.equal(model.cache.read_window(0, layers, 25, 41), model.cache.read_window(3, layers, 25, 41))
    assert torch.equal(model.cache.read_open_pair(0, 40), model.cache.read_open_pair(3, 40))


def test_a_copied_slot_forgets_what_it_held() -> None:
    model = _run(text(41))
    model.cache.copy_slot(1, 0)
    assert not model.cache.has_window(0, model.cache.encoder_layers, 40, 41)
    with pytest.raises(StaleRingRead):
        model.cache.read_window(0, model.cache.encoder_layers, 40, 41)


def test_a_copied_block_holds_the_bytes_of_its_source() -> None:
    model = _run(text(41))
    model.cache.copy_block(1, 5)
    assert model.cache.read_block(5) == model.cache.read_block(1) != bytes(model.cache.block_bytes)
