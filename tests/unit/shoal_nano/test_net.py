"""The differentiable model against itself: packing, causality, selection, drafts, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shoal_nano import checkpoint
from shoal_nano.config import NanoConfig
from shoal_nano.generate import Sampling, generate
from shoal_nano.net import Net
from shoal_nano.ops import EXACT, SERVED
from shoal_nano.released import read_release, write_release
from shoal_nano.weights import Parameters, initial_parameters

SMALL = NanoConfig(
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=2,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_lora_rank=32,
    sliding_window=8,
    index_n_heads=2,
    index_head_dim=32,
    index_topk=4,
    candidate_topk_blocks=2,
    moe_intermediate_size=32,
    n_routed_experts=4,
    engram_vocab_size=20,
    engram_compressed_vocab_size=64,
    dspark_markov_rank=8,
)


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return initial_parameters(SMALL, 0)


def _net(numerics: object = EXACT) -> Net:
    return Net(SMALL, torch.arange(64), numerics)  # type: ignore[arg-type]


def _hidden(net: Net, parameters: Parameters, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    w = net.serve({name: p.to(net.nu.math) for name, p in parameters.items()})
    return net.forward(w, ids, start, start, sparse=True).hidden


def test_a_packed_document_computes_what_it_computes_alone(parameters: Parameters) -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, 64, (1, n), generator=generator) for n in (16, 24))
    packed = torch.cat((first, second), 1)
    start = torch.cat((torch.zeros_like(first), torch.full_like(second, 16)), 1)
    alone = _hidden(_net(), parameters, second, torch.zeros_like(second))
    together = _hidden(_net(), parameters, packed, start)[:, 16:]
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_later_tokens_do_not_change_earlier_rows(parameters: Parameters) -> None:
    ids = torch.randint(3, 64, (1, 32), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[:, 20:] = 3
    zero = torch.zeros_like(ids)
    a, b = (_hidden(_net(), parameters, x, zero)[:, :20] for x in (ids, changed))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_indexer_loss_reaches_the_indexer_alone(parameters: Parameters) -> None:
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    net = _net(SERVED)
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(3))
    zero = torch.zeros_like(ids)
    out = net.forward(net.serve(leaves), ids, zero, zero, sparse=False, sampled_rows=torch.arange(8, 32))
    out.index_loss.backward()
    reached = {name for name, p in leaves.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == {"indexer.wk", "indexer.k_norm", "indexer.wq_b", "indexer.weights_proj"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_and_drafts_do_not_change_the_output(parameters: Parameters, temperature: float) -> None:
    net = _net(SERVED)
    w = net.serve(parameters)
    sampling = Sampling(temperature=temperature, seed=9)
    plain = generate(net, w, [0, 5, 9, 11], 12, sampling, torch.device("cpu"))
    for guess in ([7] * 12, plain.output, [*plain.output[:5], 3]):
        assert generate(net, w, [0, 5, 9, 11], 12, sampling, torch.device("cpu"), guess=guess).output == plain.output


def test_a_checkpoint_continues_from_nearly_the_same_weights(parameters: Parameters, tmp_path: Path) -> None:
    checkpoint.save(parameters, {"runs": [1]}, tmp_path)
    back, log = checkpoint.load(tmp_path)
    assert log == {"runs": [1]}
    for name, value in parameters.items():
        torch.testing.assert_close(back[name], value, rtol=1e-3, atol=1e-3)


def test_a_release_serves_the_weights_that_training_served(parameters: Parameters, tmp_path: Path) -> None:
    write_release(parameters, SMALL, tmp_path)
    config, back = read_release(tmp_path)
    assert config == SMALL
    ids = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(4))
    zero = torch.zeros_like(ids)
    assert torch.equal(_hidden(_net(SERVED), parameters, ids, zero), _hidden(_net(SERVED), back, ids, zero))
