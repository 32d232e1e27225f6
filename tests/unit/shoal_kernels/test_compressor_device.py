"""Compressed entries on a device, from projections to pages, against the host."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED, SERVED_BF16, Precision
from shoal_kernels.ops.compressor import pool_pairs, store_key, store_main
from shoal_kernels.ops.norm_rope import plain_rope_table, rms_norm, rms_norm_rope, rope
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import index_format, main_format
from support.on_device import DEVICE, assert_equal_bits, assert_rows_independent, needs_device, relative_error
from support.seldom import seldom
from torch import Tensor
from unit.shoal_kernels.device_rows import ROWS, SIZES_ALONE
from unit.shoal_kernels.parity import assert_same_bits, normal, values

EPS = 1e-20


class _Problem:
    """Groups that close, some with a member in the ring, and where their entries go."""

    def __init__(self, ratio: int, groups: int, dim: int) -> None:
        self.ratio, self.groups, self.dim = ratio, groups, dim
        rows = ratio * groups
        self.raw = values(rows, ratio * dim + 16, seed=groups, bf16=False).clamp(-50, 50)[:, : ratio * dim]
        kept = 5 if ratio == 2 else 0
        self.ring = normal(kept, ratio, dim, seed=6)
        self.members = kept + torch.arange(rows).view(groups, ratio).T.contiguous()
        if kept:
            self.members[0, ::3] = torch.arange(groups)[::3] % kept
        self.weight, self.positions = normal(dim, seed=7), torch.arange(groups) * ratio
        places = torch.randperm(groups, generator=torch.Generator().manual_seed(1))
        self.blocks, self.slots = places // 8, places % 8
        self.table = plain_rope_table(16, 10000.0, 1 << 17)
        self.table.cover(ratio * groups, DEVICE)

    def pages(self, precision: Precision, device: str) -> tuple[PagedRows, PagedRows]:
        blocks = max(1, -(-self.groups // 8))
        main, index = main_format(self.dim, precision), index_format(self.dim, precision)
        storage = [torch.zeros(blocks, 8 * f.units + 32, dtype=torch.uint8, device=device) for f in (main, index)]
        return PagedRows(storage[0], 32, 8, main, False), PagedRows(storage[1], 0, 8, index, True)

    def run(self, precision: Precision, device: str, chosen: Tensor | None = None) -> tuple[Tensor, ...]:
        """Latents, then what the main and index pages hold for the chosen groups."""
        main, index = self.pages(precision, device)
        chosen = torch.arange(self.groups) if chosen is None else chosen.cpu()
        raw, ring, weight = self.raw.to(device), self.ring.to(device), self.weight.to(device)
        at = self.positions[chosen].to(device)
        places = self.blocks[chosen].to(device), self.slots[chosen].to(device)
        members = self.members[:, chosen].to(device)
        latent = store_main(raw, ring, members, weight, EPS, at, self.table, main, *places, precision=precision)
        store_key(latent, weight, EPS, at, self.table, index, *places, precision=precision)
        return latent, main.read_bytes(*places), index.read_bytes(*places)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("groups", "dim"), [(0, 64), (1, 32), (9, 96)])
def test_entries_are_near_the_host(ratio: int, groups: int, dim: int) -> None:
    _compare(_Problem(ratio, groups, dim))


@needs_device
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("groups", "dim"), [(768, 512), (333, 128)])
def test_entries_of_released_sizes_are_near_the_host(ratio: int, groups: int, dim: int) -> None:
    _compare(_Problem(ratio, groups, dim))


@pytest.mark.parametrize("ratio", [2, *seldom(1)])
def test_an_entry_does_not_depend_on_the_others_of_its_step(ratio: int) -> None:
    problem = _Problem(ratio, ROWS, 64)
    assert_rows_independent(lambda chosen: problem.run(SERVED_BF16, DEVICE, chosen), ROWS, sizes=SIZES_ALONE)


@pytest.mark.parametrize(("rows", "dim"), [(0, 64), (5, 96)])
def test_pairs_are_pooled_as_on_the_host(rows: int, dim: int) -> None:
    score, value = normal(2, rows, dim, seed=1, scale=5.0), values(2, rows, dim, seed=2, bf16=False)
    got = pool_pairs(score.to(DEVICE), value.to(DEVICE), precision=SERVED_BF16)
    assert_equal_bits(got, pool_pairs(score, value, precision=SERVED).bfloat16())


@pytest.mark.parametrize("ratio", [1, 2])
def test_stored_entries_have_the_bits_of_the_parts_on_the_host(ratio: int) -> None:
    problem = _Problem(ratio, 9, 64)
    latent, entries, keys = problem.run(SERVED, "cpu")
    source = torch.cat((problem.ring, problem.raw.reshape(-1, ratio, 64)))[problem.members]
    pooled = SERVED.bf16(source[0, :, 0])
    if ratio == 2:
        pooled = pool_pairs(source[:, :, 0], source[:, :, 1], precision=SERVED)
    assert_same_bits(latent, rms_norm(pooled, problem.weight, EPS, precision=SERVED))
    rotated = rope(latent, problem.positions, problem.table, precision=SERVED)
    assert_same_bits(entries, main_format(64, SERVED).encode(rotated))
    key = rms_norm_rope(latent, problem.weight, EPS, problem.positions, problem.table, precision=SERVED)
    assert_same_bits(keys, index_format(64, SERVED).encode(key))


def test_a_member_outside_ring_and_rows_is_refused() -> None:
    problem = _Problem(2, 3, 64)
    problem.members[1, 2] = 5 + 6
    with pytest.raises(ValueError, match=r"members must be in \[0, 11\)"):
        problem.run(SERVED, "cpu")


def _compare(problem: _Problem) -> None:
    got, want = problem.run(SERVED_BF16, DEVICE), problem.run(SERVED, "cpu")
    assert relative_error(got[0], want[0]) < 2e-3
    for i, layout in ((1, main_format), (2, index_format)):
        decoded = [layout(problem.dim, SERVED).decode(records[i].cpu()) for records in (got, want)]
        assert relative_error(*decoded) < 2e-2
