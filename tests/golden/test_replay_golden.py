"""Bounded replay, hand-over to decode, greedy and speculative decoding against the recorded run."""

from __future__ import annotations

import json

import pytest
import torch
from shoal_kernels.precision import EXACT
from shoal_model.model import Model
from shoal_model.propose import propose
from shoal_model.sampler import accept_length
from shoal_model.sequence import SequenceRun
from shoal_model.trace import Recorder
from support.seldom import seldom
from support.tiny_model import GOLDEN, REPLAY, golden, tiny_model
from torch import Tensor

TOLERANCE = 2e-6


def prefilled(chunk: int = 48) -> tuple[Model, SequenceRun, Tensor]:
    expected = golden("replay_exact")
    model = tiny_model(EXACT)
    ids = expected["ids"].tolist()
    run = SequenceRun(model, slot=2, block_table=[4], prompt_length=len(ids), replay_length=REPLAY)
    return model, run, run.run_chunks(ids, chunk)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.to(want.dtype), want, rtol=TOLERANCE, atol=TOLERANCE)


def test_replayed_rows_are_reproduced() -> None:
    expected = golden("replay_exact")
    model, recorder = tiny_model(EXACT), Recorder()
    ids = expected["ids"].tolist()
    run = SequenceRun(model, slot=2, block_table=[4], prompt_length=len(ids), replay_length=REPLAY)
    hidden = run.run(ids, expected["positions"].tolist(), recorder)
    assert run.decoder_start == int(expected["replay_from"])
    close(model.logits(hidden), expected["logits"])
    close(recorder.values["dspark.features"], expected["features"][-22:])
    for layer in range(model.config.num_hidden_layers):
        close(recorder.values[f"layers.{layer}.window_kv"], expected[f"layers.{layer}.window_kv"])


@pytest.mark.parametrize("chunk", [7, *seldom(48, 1)])
def test_greedy_decoding_after_the_replay_is_reproduced(chunk: int) -> None:
    expected = golden("replay_exact")
    model, run, hidden = prefilled(chunk)
    tokens, logits = [], [model.logits(hidden)[0]]
    for _ in range(24):
        tokens.append(int(logits[-1].argmax()))
        logits.append(model.logits(run.run(tokens[-1:], (0,)))[0])
    assert tokens == expected["greedy_tokens"].tolist()
    close(torch.stack(logits), expected["continuation_logits"])


def test_the_first_draft_after_the_replay_is_reproduced() -> None:
    expected = golden("replay_exact")
    model, run, hidden = prefilled()
    logits: list[Tensor] = []

    def greedy(_: int, row: Tensor, __: Tensor) -> Tensor:
        logits.append(row[0])
        return row.argmax(1)

    proposal = propose(model, [run.anchor(int(model.logits(hidden)[0].argmax()))], greedy)
    assert torch.equal(proposal.token_ids[0], expected["draft_tokens"])
    close(torch.stack(logits), expected["draft_logits"])
    close(torch.sigmoid(proposal.confidence_logits[0]), expected["confidence"])


def verify(model: Model, run: SequenceRun, token: int, drafts: list[int]) -> tuple[int, int]:
    """One round: accept length and the token emitted after the accepted drafts."""
    rows = [token, *drafts]
    start = run.length
    sampled = model.logits(run.run(rows, range(len(rows)))).argmax(1).tolist()
    accepted = accept_length(drafts, sampled)
    run.rewind(start + 1 + accepted)
    return accepted, sampled[accepted]


def facts() -> dict[str, list[int]]:
    loaded: dict[str, list[int]] = json.loads((GOLDEN / "manifest.json").read_text())["facts"]
    return loaded


def test_speculative_decoding_with_its_own_drafts_is_reproduced() -> None:
    model, run, hidden = prefilled()
    emitted, counts = [int(model.logits(hidden)[0].argmax())], []
    while len(emitted) < 24:
        proposal = propose(model, [run.anchor(emitted[-1])], lambda _, row, __: row.argmax(1))
        drafts = proposal.token_ids[0].tolist()
        accepted, token = verify(model, run, emitted[-1], drafts)
        counts.append(accepted)
        emitted += [*drafts[:accepted], token]
    assert emitted == golden("replay_exact")["greedy_tokens"].tolist()
    assert counts == facts()["dspark_accepted_counts"]


def test_speculative_decoding_with_scripted_drafts_accepts_what_is_right() -> None:
    expected = golden("replay_exact")["greedy_tokens"].tolist()
    model, run, hidden = prefilled()
    emitted, counts = [int(model.logits(hidden)[0].argmax())], []
    for right in facts()["scripted_accepted_counts"]:
        done = len(emitted)
        drafts = expected[done : done + right]
        drafts += [(token + 1) % 512 for token in (expected[done + right : done + 5] or [])]
        accepted, token = verify(model, run, emitted[-1], drafts[:5])
        counts.append(accepted)
        emitted += [*drafts[:accepted], token]
    assert emitted[:24] == expected
    assert counts == facts()["scripted_accepted_counts"]
