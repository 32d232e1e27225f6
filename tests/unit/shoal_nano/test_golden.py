"""The formulas against the golden tiny model, where the repository carries it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shoal_nano.draft import draft_blocks, markov
from shoal_nano.net import Net
from shoal_nano.ops import EXACT
from shoal_nano.released import read_release
from shoal_nano.tokenizer import compressed_ids
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


@pytest.mark.skipif(not (GOLDEN / "tiny" / "config.json").exists(), reason="no golden files in this checkout")
def test_exact_logits_and_drafts_equal_the_golden_files() -> None:
    config, parameters = read_release(GOLDEN / "tiny")
    compressed = torch.tensor(compressed_ids(Tokenizer.from_file(str(GOLDEN / "tiny" / "tokenizer.json"))))
    text, drafted = load_file(GOLDEN / "text_exact.safetensors"), load_file(GOLDEN / "draft_exact.safetensors")
    net = Net(config, compressed, EXACT)
    w = net.serve({name: p.double() for name, p in parameters.items()})
    ids = text["ids"][None]
    zero = torch.zeros_like(ids)
    out = net.forward(w, ids, zero, zero, sparse=True)
    torch.testing.assert_close(net.logits(w, out.hidden)[0].float(), text["logits"], rtol=1e-3, atol=1e-4)
    token, last = drafted["token"].view(1, 1), drafted["last_pos"].view(1, 1)
    block = draft_blocks(net, w, out.features, last, token, torch.zeros_like(last))
    previous = torch.cat((token[0], drafted["draft_tokens"][:-1]))
    logits, confidence = markov(net, w, block.hidden[0, 0], block.base[0, 0], previous)
    torch.testing.assert_close(logits.float(), drafted["draft_logits"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.sigmoid(confidence).float(), drafted["confidence"], rtol=1e-3, atol=1e-4)
