"""Engram: compiled bits equal the reference's; hashing follows the specification."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels import SERVED
from shoal_kernels.ops.engram import EngramTable, gate, gate_weight, gather, hash_rows
from unit.shoal_kernels.parity import ROW_COUNTS, assert_rows_independent, assert_same_bits, normal, values


def _table() -> EngramTable:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 127, (50, 64), generator=generator, dtype=torch.uint8)
    return EngramTable(data, torch.randint(110, 130, (50, 2), generator=generator, dtype=torch.uint8))


@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_gathered_values_have_the_bits_of_the_reference(rows: int) -> None:
    ids = torch.randint(-1, 50, (rows, 6), generator=torch.Generator().manual_seed(rows))
    got, want = (gather(_table(), ids, precision=SERVED, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("size", [32, 40])
def test_gate_has_the_bits_of_the_reference(rows: int, size: int) -> None:
    streams, kv = values(rows, 4, size, seed=rows), values(rows, 5 * size, seed=rows + 1)
    weight = gate_weight(normal(4, size, seed=3).bfloat16(), normal(4, size, seed=4).bfloat16())
    skip = torch.arange(rows) % 5 == 2
    got, want = (gate(streams, kv, weight, skip, precision=SERVED, backend=name) for name in ("cpu", "reference"))
    assert_same_bits(got, want)
    assert torch.equal(got[skip], streams[skip])


def test_rows_do_not_depend_on_their_batch() -> None:
    streams, kv, weight = values(70, 4, 32, seed=1), values(70, 160, seed=2), normal(4, 32, seed=3)
    skip = torch.arange(70) % 9 == 0
    assert_rows_independent(lambda rows: gate(streams[rows], kv[rows], weight, skip[rows], precision=SERVED), 70)


_MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}


def _primes(first: int) -> torch.Tensor:
    found: list[int] = []
    candidate = first
    while len(found) < 24:
        if all(candidate % divisor for divisor in range(2, 4001)):
            found.append(candidate)
        candidate += 1
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("layer", "first", "last", "columns"),
    [
        (1, 16000057, 16000463, {0: 1326936, 1: 22120929, 2: 40011923, 8: 142088989, 16: 270969918, 23: 378628807}),
        (14, 16000477, 16000889, {0: 5403109, 1: 26519290, 2: 42262171, 8: 136663117, 16: 258079010, 23: 378588994}),
    ],
)
def test_hashes_of_the_specification(layer: int, first: int, last: int, columns: dict[int, int]) -> None:
    primes = _primes(first)
    assert primes[-1] == last
    lookback, none = torch.tensor([[40, 30, 20, 10]]), torch.zeros(1, 4, dtype=torch.bool)
    rows = hash_rows(lookback, none, torch.tensor(_MULTIPLIERS[layer]), primes, primes.cumsum(0) - primes, 2)
    assert {column: rows[0, column].item() for column in columns} == columns


def test_an_image_token_hides_itself_and_everything_older() -> None:
    primes = torch.arange(101, 107)
    arguments = torch.tensor([3, 5, 7, 9]), primes, primes.cumsum(0) - primes, 2
    lookback = torch.tensor([[40, 30, 20, 10], [40, 30, 2, 2], [40, 30, 20, 10]])
    image = torch.tensor([[False, False, True, False], [False] * 4, [True, False, False, False]])
    rows = hash_rows(lookback, image, *arguments)
    assert torch.equal(rows[0], rows[1])
    assert rows[2].tolist() == [-1] * 6


def test_a_row_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must be in \[-1, 50\), got 50 \.\. 50"):
        gather(_table(), torch.tensor([[50]]), precision=SERVED)
