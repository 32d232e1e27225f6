"""The draft head against recorded drafts."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.precision import EXACT, KV, SERVED, Precision
from shoal_model.model import Model
from shoal_model.propose import propose
from shoal_model.sequence import SequenceRun
from shoal_model.trace import Recorder
from support.tiny_model import BACKTRACK, WINDOW, golden, normed, tiny_model
from torch import Tensor

CASES = [("exact", EXACT, 2e-6), ("kv", KV, 5e-5)]


def after_the_text(precision: Precision, name: str) -> tuple[Model, SequenceRun]:
    model = tiny_model(precision)
    run = SequenceRun(model, slot=1, block_table=[5])
    ids = golden(f"text_{name}")["ids"].tolist()
    run.run(ids, ())
    assert run.length - 1 == int(golden(f"draft_{name}")["last_pos"])
    return model, run


@pytest.mark.parametrize(("name", "precision", "tolerance"), CASES)
def test_draft_blocks_and_heads_are_reproduced(name: str, precision: Precision, tolerance: float) -> None:
    expected = golden(f"draft_{name}")
    model, run = after_the_text(precision, name)
    recorder = Recorder()
    head = model.draft([run.anchor(int(expected["token"]))], recorder)
    logits: list[Tensor] = []

    def greedy(_: int, row: Tensor, __: Tensor) -> Tensor:
        logits.append(row[0])
        return row.argmax(1)

    proposal = propose(model, [run.anchor(int(expected["token"]))], greedy)
    values = {
        **recorder.values,
        "head_hidden": head.hidden[0],
        "base_logits": head.base_logits[0],
        "draft_logits": torch.stack(logits),
        "confidence": torch.sigmoid(proposal.confidence_logits[0]),
    }
    assert torch.equal(proposal.token_ids[0], expected["draft_tokens"])
    for key, want in expected.items():
        if want.is_floating_point():
            got = values[key].to(want.dtype)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=key)


def test_served_rounding_of_draft_blocks_is_reproduced_module_by_module() -> None:
    expected, text = golden("draft_sim"), golden("text_sim")
    model, run = after_the_text(SERVED, "sim")
    assert model.drafter is not None
    ring, kept = model.cache.state.draft, WINDOW + BACKTRACK
    positions = torch.arange(48 - kept, 48)
    places = torch.from_numpy(ring.tags.places(torch.full((kept,), 1).numpy(), positions.numpy()))
    model.drafter.write_context(text["dspark.features"][-kept:], positions, places)
    rows = model.drafter.plan([run.anchor(int(expected["token"]))])
    recorder = Recorder()
    for i, block in enumerate(model.drafter.blocks):
        block.attend(normed(expected[f"mtp.{i}.attn_in"], SERVED), rows, ring, i, recorder)
        block.frame.feed_forward(expected[f"mtp.{i}.ffn_in"], recorder)
        for name in ("block_kv", "attn_out", "ffn_out"):
            got, want = recorder.values[f"mtp.{i}.{name}"], expected[f"mtp.{i}.{name}"]
            error = float((got - want).norm() / want.norm())
            assert error < 5e-3, f"mtp.{i}.{name}: relative error {error:.2e}"
    step = model.markov_step(expected["token"][None], expected["base_logits"][:1], expected["head_hidden"][:1])
    torch.testing.assert_close(step.logits[0], expected["draft_logits"][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.sigmoid(step.confidence_logit), expected["confidence"][:1], rtol=1e-5, atol=1e-6)


def test_served_features_are_reproduced_from_recorded_taps() -> None:
    text = golden("text_sim")
    model = tiny_model(SERVED)
    assert model.drafter is not None
    got = model.drafter.features(torch.cat([text[f"dspark.tap{i}"] for i in range(3)], dim=1))
    error = float((got - text["dspark.features"]).norm() / text["dspark.features"].norm())
    assert error < 5e-3
