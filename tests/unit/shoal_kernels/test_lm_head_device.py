"""The fused LM head and the Markov loop on a device: tokens of the logits path, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.lm_head import MarkovDraft, lm_head_argmax, markov_loop
from shoal_kernels.ops.sampling import RowSampling, coupled_argmax, inverse_temperatures, process_logits
from shoal_kernels.precision import SERVED, SERVED_BF16
from support.on_device import DEVICE, HAS_DEVICE, assert_rows_independent, backends, needs_device, relative_error
from torch import Tensor

SHAPES = [(7, 512, 128), (70, 1000, 104), (5, 128, 1024)]
"""Rows, vocabulary, depth. The last one's logits are sums of two segments of K."""
RELEASED = (129280, 5120)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """As `normal`, made where it is used: a head of released size takes seconds and 7 GB on the host."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).mul_(scale).bfloat16()


def how(rows: int) -> tuple[list[RowSampling], Tensor, Tensor, Tensor, Tensor]:
    """Settings of rows: greedy ones, T = 1 and others; then 1/T, seeds, positions and is_greedy on the device."""
    settings = [RowSampling(temperature=(1.0, 0.0, 0.7, 1.3)[i % 4]) for i in range(rows)]
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    greedy = torch.tensor([row.is_greedy for row in settings], dtype=torch.bool)
    positions = torch.arange(rows) * 3
    inverse = inverse_temperatures(settings)
    return settings, inverse.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE), greedy.to(DEVICE)


@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize("shape", [(0, 512, 128), *SHAPES])
def test_the_token_is_that_of_the_host(backend: str, shape: tuple[int, int, int]) -> None:
    rows, vocab, depth = shape
    hidden, weight = normal(rows, depth, seed=1), normal(vocab, depth, seed=2, scale=0.3)
    _, *arguments = how(rows)
    stored = LinearWeight.from_bf16(weight.to(DEVICE), keep_bytes=True)
    got = lm_head_argmax(hidden.to(DEVICE), stored, *arguments, precision=SERVED_BF16, backend=backend)
    on_host = [argument.cpu() for argument in arguments]
    want = lm_head_argmax(hidden.float(), LinearWeight.from_bf16(weight), *on_host, precision=SERVED)
    # The sums over K differ in rounding; with these seeds no two best values lie nearer than that.
    assert torch.equal(got.cpu(), want)


def test_equal_logits_go_to_the_smaller_id() -> None:
    weight = torch.zeros(512, 128)
    weight[300], weight[40], weight[41] = 1.0, 1.0, 1.0
    stored = LinearWeight.from_bf16(weight.to(DEVICE), keep_bytes=True)
    greedy = torch.ones(3, dtype=torch.bool, device=DEVICE)
    zero, one = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.ones(3, device=DEVICE)
    hidden = torch.ones(3, 128, dtype=torch.bfloat16, device=DEVICE)
    got = lm_head_argmax(hidden, stored, one, zero, zero, greedy, precision=SERVED_BF16, backend="triton")
    assert got.tolist() == [40, 40, 40]


@pytest.mark.parametrize("backend", backends(tilelang=True))
def test_a_hidden_row_keeps_its_token_in_any_batch_on_the_device(backend: str) -> None:
    rows, vocab, depth = (200, *RELEASED) if HAS_DEVICE else (66, 512, 64)
    hidden = drawn(rows, depth, seed=3)
    stored = LinearWeight.from_bf16(drawn(vocab, depth, seed=4, scale=0.05), keep_bytes=True)
    _, *arguments = how(rows)

    def tokens(at: Tensor) -> Tensor:
        chosen = (argument[at] for argument in arguments)
        return lm_head_argmax(hidden[at], stored, *chosen, precision=SERVED_BF16, backend=backend)

    assert_rows_independent(tokens, rows, sizes=(1, 2, 3, 4, 5, 6) if HAS_DEVICE else (1, 6))


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("rows", [1, 6, 48, 64, 65, 360, 1536])
def test_fused_rows_and_rows_with_logits_get_the_same_token(rows: int) -> None:
    hidden = drawn(rows, RELEASED[1], seed=rows)
    # Logits of a few tenths apart at most: the noise decides, and many tokens are near the best.
    stored = LinearWeight.from_bf16(drawn(*RELEASED, seed=4, scale=0.002), keep_bytes=True)
    settings, *arguments = how(rows)
    fused = lm_head_argmax(hidden, stored, *arguments, precision=SERVED_BF16)
    logits = linear(hidden, stored, out="f32", precision=SERVED_BF16)
    assert torch.equal(fused, coupled_argmax(process_logits(logits, settings), *arguments[1:]))


@pytest.mark.parametrize("backend", backends(tilelang=True))
@pytest.mark.parametrize("rows", [64, 130] if HAS_DEVICE else [3])
def test_tokens_that_tie_after_rounding_are_told_apart_as_by_the_exact_noise(backend: str, rows: int) -> None:
    """Whole logits at a temperature of 2^-21: a last place of z is larger than most differences of the noise."""
    vocab, depth = (5000, 512) if HAS_DEVICE else (256, 64)
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randint(0, 2, (rows, depth), generator=generator).bfloat16().to(DEVICE)
    weight = torch.randint(-1, 2, (vocab, depth), generator=generator).bfloat16().to(DEVICE)
    stored = LinearWeight.from_bf16(weight, keep_bytes=True)
    _, _, seeds, positions, greedy = how(rows)
    inverse = torch.full((rows,), 2.0**21, device=DEVICE)
    got = lm_head_argmax(hidden, stored, inverse, seeds, positions, greedy, precision=SERVED_BF16, backend=backend)
    logits = hidden.float() @ weight.float().T
    z = torch.where(greedy[:, None], logits, logits * inverse[:, None]).cpu()
    want = coupled_argmax(z, seeds.cpu(), positions.cpu(), greedy.cpu(), backend="reference")
    assert torch.equal(got.cpu(), want)


def draft(at: Tensor, device: str, precision: object, width: int, *, count: int = 7) -> MarkovDraft:
    vocab, depth, rank, keep = 700, 104, 32, device == DEVICE and precision is SERVED_BF16
    base = torch.randn(count, 5, vocab, generator=torch.Generator().manual_seed(1)) * 3.0
    hidden, embed = normal(count, 5, depth, seed=2), normal(vocab, rank, seed=3)
    markov = LinearWeight.from_bf16(normal(vocab, rank, seed=4, scale=0.3).to(device), keep_bytes=keep)
    chance = LinearWeight.from_bf16(normal(1, depth + rank, seed=5, scale=0.2).to(device), keep_bytes=keep)
    previous = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(6))
    _, *arguments = how(count)
    rows = at.to(device)
    return markov_loop(
        base.to(device)[rows],
        hidden.to(device, torch.bfloat16 if keep else torch.float32)[rows],
        previous.to(device)[rows],
        embed.to(device),
        markov,
        chance,
        *(argument.to(device)[rows] for argument in arguments),
        width=width,
        precision=SERVED_BF16 if keep else SERVED,
        backend="triton" if keep else None,
    )


@pytest.mark.parametrize("width", [1, pytest.param(5, marks=pytest.mark.long)])
def test_drafts_are_those_of_the_host(width: int) -> None:
    everything = torch.arange(7)
    got, want = draft(everything, DEVICE, SERVED_BF16, width), draft(everything, "cpu", SERVED, width)
    assert torch.equal(got.token_ids.cpu(), want.token_ids)
    assert relative_error(got.confidence_logits, want.confidence_logits) < 1e-5
    # A rival in the winner's own tile of 128 is missed: then the margin is larger, never smaller.
    apart = got.margins.cpu() - want.margins
    assert (apart > -1e-4).all()
    assert (apart.abs() < 1e-4).float().mean() > 0.6


@pytest.mark.long
def test_a_sequence_gets_its_drafts_in_any_batch() -> None:
    def drafts(at: Tensor) -> tuple[Tensor, Tensor]:
        result = draft(at, DEVICE, SERVED_BF16, 2)
        return result.token_ids, result.confidence_logits

    assert_rows_independent(drafts, 7, sizes=(1, 3) if HAS_DEVICE else (3,))
