"""Nano's logits have the same bits from the compiled kernels and from the references, in chunks of any size."""

from __future__ import annotations

import random

import pytest
import torch
from shoal_engine.llm import model_directory
from shoal_kernels import registry
from shoal_model import logits
from torch import Tensor

# More than two windows, 64 selected entries at ratio 2 and 1, and the 512 entries of nano's candidate blocks.
TOKENS = random.Random(4).choices(range(3, 3500), k=600)


def run(monkeypatch: pytest.MonkeyPatch, chunk: int, token_ids: list[int] = TOKENS) -> Tensor:
    monkeypatch.setattr(logits, "_CHUNK_ROWS", chunk)
    return logits.sequence_logits(model_directory("nano"), token_ids).view(torch.int32)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_600_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, 600)
    for chunk in (7, 128):
        assert torch.equal(run(monkeypatch, chunk), whole)
    assert torch.equal(run(monkeypatch, 1, TOKENS[:200]), whole[:200])
    references = {op: entries[-1:] for op, entries in registry.IMPLEMENTATIONS.items()}
    assert all(entry.backend == "reference" for (entry,) in references.values())
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", references)
    monkeypatch.setattr(registry, "_chosen", {})
    assert torch.equal(run(monkeypatch, 64), whole)
