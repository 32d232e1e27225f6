"""By how much a token won: compiled against the reference, and against the winner's own definition."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.ops.sampling import coupled_argmax, coupled_margins, gumbel


@pytest.mark.parametrize("rows", [0, 1, 6, 70])
@pytest.mark.parametrize("vocab", [2, 5, 64, 999])
def test_compiled_margins_equal_the_reference(rows: int, vocab: int) -> None:
    z = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3.0
    z[1::3] *= 20.0
    z[2::9] = 0.0
    z[:, 3::7] = -torch.inf
    seeds, positions = torch.arange(rows) * 0x123456789ABCDEF, torch.arange(rows)
    greedy = torch.arange(rows) % 4 == 0
    tokens = coupled_argmax(z, seeds, positions, greedy)
    got, want = (coupled_margins(z, seeds, positions, greedy, tokens, backend=b) for b in ("cpu", "reference"))
    assert torch.equal(got, want)
    noisy = torch.where(greedy[:, None], z, z + gumbel(seeds, positions, vocab))
    two = noisy.topk(2, dim=1).values
    assert torch.equal(got, two[:, 0] - two[:, 1])


def test_a_token_without_rivals_wins_by_infinity() -> None:
    z = torch.tensor([[-torch.inf, 1.0, -torch.inf], [-torch.inf, 1.0, -torch.inf]])
    greedy = torch.tensor([True, False])
    zeros = torch.zeros(2, dtype=torch.int64)
    for backend in ("cpu", "reference"):
        margins = coupled_margins(z, zeros, zeros, greedy, torch.ones(2, dtype=torch.int64), backend=backend)
        assert margins.tolist() == [torch.inf, torch.inf]
