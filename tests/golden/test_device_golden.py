"""Recorded forwards against an accelerator, module by module: each gets recorded inputs, so that errors do not add up.

Sums in another order and softmax weights in bfloat16 flip single Q8 roundings of later inputs; a flip moves a value by
up to a sixteenth. Hence the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.precision import SERVED_BF16
from shoal_model.model import Model
from shoal_model.rows import RowBatch, Segment, StepLimits, StepPlan, plan_step
from shoal_model.sequence import SequenceRun
from shoal_model.shipping import ship
from shoal_model.trace import Recorder
from support.device_model import device_model, window_values
from support.on_device import DEVICE, needs_device, relative_error
from support.tiny_model import BACKTRACK, WINDOW, golden, normed
from torch import Tensor

pytestmark = [pytest.mark.gpu, needs_device]
TOLERANCE, FEW_ROWS = 2.5e-2, 4e-2  # a draft block has five rows: one flip more or less shows
LIMITS = StepLimits(num_blocks=9, vocab_size=512, max_positions=4096)


def there(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(DEVICE)


def planned(model: Model, length: int) -> StepPlan:
    segment = Segment(slot=0, block_table=[3], start=0, token_ids=[0] * length, lookback=[2, 2, 2])
    model.cache.state.reserve(64)
    model.cover_positions(length)
    step = plan_step(RowBatch(segments=(segment,)), model.cache.state, window=WINDOW, ratios=(1, 2), limits=LIMITS)
    return ship(step, model.device)


def test_every_module_of_the_backbone_is_reproduced() -> None:
    expected, model, recorder = golden("text_sim"), device_model(), Recorder()
    step = planned(model, len(expected["ids"]))
    assert step.decoder is not None
    selected, worst, picked = None, dict[str, float](), dict[str, float]()
    for layer in model.backbone.layers:
        number = layer.plan.layer
        half = step.encoder if layer.plan.is_encoder else step.decoder
        given = layer.prepare(normed(there(expected[f"layers.{number}.attn_in"]), SERVED_BF16), step)
        _, selected = layer.attend(given, half, step.block_table, selected, recorder)
        layer.feed_forward(there(expected[f"layers.{number}.ffn_in"]), recorder)
        for name in ("topk", "candidate_blocks", "ffn.expert_ids"):
            key = f"layers.{number}.{name}"
            if key in expected:
                picked[key] = float((recorder.values[key].cpu() == expected[key]).float().mean())
        for name in ("window_kv", "attn_out", "ffn_out"):
            key = f"layers.{number}.{name}"
            got = recorder.values[key]
            got = window_values(got) if name == "window_kv" else got
            worst[key] = relative_error(got, expected[key])
    print("\nlargest relative errors:", sorted(((e, k) for k, e in worst.items()), reverse=True)[:4])
    print("least agreement of choices:", sorted((share, key) for key, share in picked.items())[:4])
    assert max(worst.values()) < TOLERANCE
    assert min(picked.values()) > 0.98


def test_every_module_of_the_draft_head_is_reproduced() -> None:
    expected, text, model = golden("draft_sim"), golden("text_sim"), device_model()
    assert model.drafter is not None
    run = SequenceRun(model, slot=1, block_table=[5])
    run.run(text["ids"].tolist(), ())
    ring, kept = model.cache.state.draft, WINDOW + BACKTRACK
    positions = torch.arange(48 - kept, 48)
    places = torch.from_numpy(ring.tags.places(torch.full((kept,), 1).numpy(), positions.numpy()))
    features = there(text["dspark.features"][-kept:])
    model.drafter.write_context(features, positions.to(DEVICE), places.to(DEVICE))
    rows = ship(model.drafter.plan([run.anchor(int(expected["token"]))]), model.device)
    recorder = Recorder()
    for i, block in enumerate(model.drafter.blocks):
        block.attend(normed(there(expected[f"mtp.{i}.attn_in"]), SERVED_BF16), rows, ring, i, recorder)
        block.frame.feed_forward(there(expected[f"mtp.{i}.ffn_in"]), recorder)
        for name in ("block_kv", "attn_out", "ffn_out"):
            got, want = recorder.values[f"mtp.{i}.{name}"], expected[f"mtp.{i}.{name}"]
            error = relative_error(window_values(got) if name == "block_kv" else got, want)
            assert error < FEW_ROWS, f"mtp.{i}.{name}: relative error {error:.2e}"
    hidden, base = there(expected["head_hidden"][:1]), expected["base_logits"][:1].to(DEVICE)
    step = model.markov_step(expected["token"][None].to(DEVICE), base, hidden)
    assert relative_error(step.logits[0], expected["draft_logits"][0]) < 1e-3
    assert relative_error(torch.sigmoid(step.confidence_logit), expected["confidence"][:1]) < 1e-3
    taps = there(torch.cat([text[f"dspark.tap{i}"] for i in range(3)], dim=1))
    assert relative_error(model.drafter.features(taps), text["dspark.features"]) < TOLERANCE
