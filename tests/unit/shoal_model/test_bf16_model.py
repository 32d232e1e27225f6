"""The whole model in the precision of accelerators, on kernels in Triton's interpreter: what needs no GPU to be wrong.

A model of four small layers, one of each kind, with random weights. On a device the tests of `tests/exactness` and
`tests/golden` run the tiny checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from shoal_kernels.precision import SERVED, SERVED_BF16, Precision
from shoal_model.config import ModelConfig
from shoal_model.device import open_device
from shoal_model.model import Model
from shoal_model.sampler import RowChoice, RowSampling, SampleRow
from shoal_model.sequence import SequenceRun
from shoal_model.synthetic import synthetic_weights
from shoal_model.weights import BackboneWeights
from support.on_device import DEVICE, relative_error
from support.tiny_model import TINY, text
from torch import Tensor


@cache
def config() -> ModelConfig:
    tiny = ModelConfig.load(TINY)
    assert tiny.engram is not None
    assert tiny.dspark is not None
    return replace(
        tiny,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        n_routed_experts=2,
        engram=replace(tiny.engram, layer_ids=(0,), num_embeddings=tiny.engram.num_embeddings[:1]),
        dspark=replace(tiny.dspark, num_blocks=1, target_layer_ids=(2, 3), n_routed_experts=2),
    )


@cache
def weights(precision: Precision, device: str) -> BackboneWeights:
    # Drawn on the host for both: a generator gives other numbers on another device.
    drawn = synthetic_weights(config(), precision=precision, device=torch.device("cpu"), seed=1)
    return drawn if device == "cpu" else moved(drawn, torch.device(device))


def model(precision: Precision, device: str = "cpu") -> Model:
    return Model(
        config(), weights(precision, device), precision=precision, device=open_device(device), num_blocks=5, num_slots=2
    )


def moved(value: object, device: torch.device) -> object:
    raise NotImplementedError


def test_try() -> None:
    import time

    for p in (SERVED, SERVED_BF16):
        m = model(p)
        run = SequenceRun(m, slot=0, block_table=[1, 2])
        for n in (5, 1):
            t = time.time()
            run.run(text(8)[:n], (n - 1,))
            print(p.name, n, time.time() - t)
        t = time.time()
        m.draft([run.anchor(9)])
        print(p.name, "draft", time.time() - t)
