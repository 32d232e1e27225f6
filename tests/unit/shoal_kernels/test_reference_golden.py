"""The torch reference against the golden single functions and the printed vectors of the specification."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import EXACT, KV, SERVED, Precision
from shoal_kernels.ops import engram, hyper_connections, indexer, norm_rope, router, sampling
from unit.shoal_kernels.golden_units import golden


def _values(name: str, precision: Precision) -> torch.Tensor:
    return golden(name).to(precision.dtype)


@pytest.mark.parametrize("name", ["plain", "yarn"])
def test_rope_frequencies_and_rotation(name: str) -> None:
    if name == "plain":
        table = norm_rope.plain_rope_table(64, 10000.0, 1 << 20)
    else:
        table = norm_rope.yarn_rope_table(
            64, 160000.0, 1 << 20, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_positions=65536
        )
    torch.testing.assert_close(table.frequencies, golden(f"rope.{name}.freq"), rtol=1e-14, atol=0)
    x, positions = _values(f"rope.{name}.in", EXACT), golden(f"rope.{name}.pos")
    out = norm_rope.rope(x, positions, table, precision=EXACT)
    torch.testing.assert_close(out.float(), golden(f"rope.{name}.out"), rtol=1e-5, atol=1e-6)
    back = norm_rope.rope(x, positions, table, inverse=True, precision=EXACT)
    torch.testing.assert_close(back.float(), golden(f"rope.{name}.inverse"), rtol=1e-5, atol=1e-6)


def test_rope_frequencies_of_the_specification() -> None:
    yarn = norm_rope.yarn_rope_table(
        64, 160000.0, 8, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_positions=65536
    ).frequencies
    want = {1: 0.6876560219336321, 15: 0.003635538583622384, 16: 0.002265625, 24: 1.953125e-5, 31: 5.680529037e-7}
    for index, value in want.items():
        assert yarn[index].item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("precision", [EXACT, KV], ids=lambda p: p.name)
def test_hyper_connections(precision: Precision) -> None:
    weight = hyper_connections.MixWeight.prepare(golden("mhc.fn"), golden("mhc.scale"), golden("mhc.base"))
    streams, y = _values("mhc.x", precision), _values("mhc.y", precision)
    pre, post, comb = hyper_connections.mix(
        streams, weight, iterations=20, eps=1e-6, rms_eps=1e-20, precision=precision
    )
    for got, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        torch.testing.assert_close(got.float(), golden(f"mhc.{name}"), rtol=2e-5, atol=1e-6)
    collapsed = hyper_connections.collapse(streams, pre, precision=precision)
    torch.testing.assert_close(collapsed.float(), golden("mhc.collapse"), rtol=1e-4, atol=1e-5)
    expanded = hyper_connections.expand(y, streams, post, comb, precision=precision)
    torch.testing.assert_close(expanded.float(), golden("mhc.expand"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [EXACT, KV, SERVED], ids=lambda p: p.name)
def test_router(precision: Precision) -> None:
    is_image = golden("router.is_image").bool()
    bias = torch.where(is_image[:, None], golden("router.bias_vl"), golden("router.bias"))
    ids, weights = router.route(_values("router.logits", precision), bias, 6, 1.5, precision=precision)
    assert torch.equal(ids.long(), golden("router.ids"))
    torch.testing.assert_close(weights.float(), golden("router.weights"), rtol=2e-6, atol=0)


def test_router_vector_of_the_specification() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, -2.0, 3.0]]), torch.tensor([0.0, 0.0, 2.0, -1.0])
    ids, weights = router.route(logits, bias, 2, 1.5, precision=SERVED)
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.3557, 1.1443]]), rtol=0, atol=5e-5)


def _lookback(ids: torch.Tensor, pad: int) -> torch.Tensor:
    padded = torch.cat((torch.full((3,), pad, dtype=ids.dtype), ids))
    return torch.stack([padded[3 - s : 3 - s + ids.shape[0]] for s in range(4)], dim=1)


def test_engram_rows() -> None:
    ids, is_image = golden("engram.compressed_ids"), golden("engram.is_image").long()
    for layer in range(2):
        primes = golden("engram.primes")[layer].flatten()
        offsets = primes.cumsum(0) - primes
        rows = engram.hash_rows(
            _lookback(ids, 2), _lookback(is_image, 0).bool(), golden("engram.multipliers")[layer], primes, offsets, 2
        )
        assert torch.equal(rows, golden("engram.rows")[layer])


def test_selection_of_entries_and_candidate_blocks() -> None:
    scores, n_vis = golden("select.scores"), golden("select.n_vis")
    assert torch.equal(indexer.top_entries(scores, n_vis, 16).long(), golden("select.top16"))
    blocks = indexer.top_blocks(scores, n_vis, golden("select.candidate_blocks").shape[1], 8)
    assert torch.equal(blocks.long(), golden("select.candidate_blocks"))
    inside = indexer.top_entries(scores, n_vis, 16, candidates=blocks, block_size=8)
    assert torch.equal(inside.long(), golden("select.top16_in_candidates"))


def test_logprobs_of_the_processed_distribution() -> None:
    rows = [
        sampling.RowSampling(temperature=float(t), top_p=float(p), top_k=int(k))
        for t, p, k in zip(golden("sample.temperature"), golden("sample.top_p"), golden("sample.top_k"), strict=True)
    ]
    got = sampling.logprobs(sampling.process_logits(golden("sample.logits"), rows, backend="reference"))
    want = golden("sample.logprobs")
    sampled = torch.tensor([not row.is_greedy for row in rows])
    assert torch.equal(got[sampled].isinf(), want[sampled].isinf())
    torch.testing.assert_close(got[sampled], want[sampled], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[~sampled].argmax(1), want[~sampled].argmax(1))
