"""On an accelerator a row's bits depend on that row's own inputs only: the whole model, in every shape of a step."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from shoal_model.model import Model
from shoal_model.rows import RowBatch, Segment
from shoal_model.sampler import RowChoice, RowSampling, SampleRow
from shoal_model.sequence import SequenceRun
from support.device_model import device_model, run_all, start
from support.on_device import needs_device
from support.tiny_model import REPLAY, WINDOW, text
from torch import Tensor

pytestmark = [pytest.mark.gpu, needs_device]
LENGTH, BLOCK = 150, 128


@cache
def whole(length: int = LENGTH, salt: int = 0) -> Tensor:
    """Hidden rows of a text, run as one chunk."""
    return run_all(start(device_model(), 0), text(length, salt), length)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 6, 7, 16, 33, 64, 128])
def test_chunks_of_any_size_give_the_same_bits(chunk: int) -> None:
    assert torch.equal(run_all(start(device_model(), 1), text(LENGTH), chunk), whole())


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 13, 32, 40])
def test_decode_steps_of_any_batch_give_the_bits_of_a_prefill(batch: int) -> None:
    model = device_model(num_blocks=2 * 40 + 1, num_slots=40)
    runs = [start(model, slot) for slot in range(batch)]
    for run in runs:
        run.run(text(60, run.slot % 7)[: 20 + run.slot], ())
    for _ in range(3):
        batch_of = RowBatch(segments=tuple(run.segment([text(70, run.slot % 7)[run.length]], (0,)) for run in runs))
        hidden = model.forward(batch_of).hidden
        for run, row in zip(runs, hidden, strict=True):
            assert torch.equal(row, whole(70, run.slot % 7)[run.length]), f"slot {run.slot}"
            run.advance([text(70, run.slot % 7)[run.length]])


def test_rows_mixed_with_other_sequences_give_the_same_bits() -> None:
    model, random = device_model(), Random(1)
    lengths = {0: LENGTH, 1: 61, 2: 90, 3: 33}
    runs = {slot: start(model, slot) for slot in lengths}
    hidden: dict[int, list[Tensor]] = {slot: [] for slot in lengths}
    while pending := [slot for slot, run in runs.items() if run.length < lengths[slot]]:
        random.shuffle(pending)
        chosen = pending[: random.randint(1, len(pending))]
        parts = {s: text(lengths[s], s)[runs[s].length :][: random.choice([1, 2, 6, 23, 40])] for s in chosen}
        batch = RowBatch(segments=tuple(runs[s].segment(part, range(len(part))) for s, part in parts.items()))
        rows = model.forward(batch).hidden
        for slot, part in parts.items():
            hidden[slot].append(rows[: len(part)])
            rows = rows[len(part) :]
            runs[slot].advance(part)
    for slot, length in lengths.items():
        assert torch.equal(torch.cat(hidden[slot]), whole(length, slot)), f"slot {slot}"


@pytest.mark.parametrize("width", range(6))
def test_verify_rows_of_any_width_give_the_bits_of_plain_rows_after_rejections(width: int) -> None:
    tokens, model, random = text(60), device_model(), Random(width)
    run, hidden = start(model, 0), []
    while run.length < 60:
        base = run.length
        good = tokens[base : base + random.randint(1, width + 1)]
        rows = good + [random.randrange(512) for _ in range(width + 1 - len(good))]
        hidden.append(run.run(rows, range(width + 1))[: len(good)])
        run.rewind(base + len(good))
    assert torch.equal(torch.cat(hidden), whole(60))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 23, 24, 25, 32, 33, 127, 128, 129])
def test_every_boundary_length_decodes_as_the_whole_forward(length: int) -> None:
    tokens = text(length + 4)
    expected = start(device_model(), 0, replay_of=length).run(tokens, range(length - 1, length + 4))
    run = start(device_model(), 0, replay_of=length)
    steps = [run.run_chunks(tokens[:length], 13)]
    steps += [run.run([token], (0,)) for token in tokens[length:]]
    assert torch.equal(torch.cat(steps), expected)


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_slots_and_blocks_give_the_same_bits(slot: int) -> None:
    model = device_model()
    run = SequenceRun(model, slot=slot, block_table=[8 - slot, 1 + slot])
    assert torch.equal(run_all(run, text(LENGTH), 47), whole())


def test_a_prefix_hit_with_restored_windows_equals_a_cold_prefill() -> None:
    length = BLOCK + REPLAY + 3
    tokens, model = text(length), device_model()
    cold = start(model, 0, replay_of=length)
    cold.run(tokens[:BLOCK], ())
    encoder = model.cache.encoder_layers
    snapshot, block = model.cache.read_window(0, encoder, BLOCK - WINDOW, BLOCK), model.cache.read_block(1)
    expected = cold.run(tokens[BLOCK:], range(3, length - BLOCK))
    other = device_model()
    hit = start(other, 3, replay_of=length)
    other.cache.write_block(7, block)
    other.cache.write_window(3, encoder, BLOCK - WINDOW, snapshot.cpu())
    hit.advance(tokens[:BLOCK])
    assert torch.equal(hit.run(tokens[BLOCK:], range(3, length - BLOCK)), expected)


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_a_hand_over_of_logical_rows_equals_the_same_instance(length: int) -> None:
    prefill, decode = device_model(), device_model()
    run = start(prefill, 0, replay_of=length)
    first = int(prefill.logits(run.run_chunks(text(length), 64))[0].argmax())
    moved = start(decode, 2, replay_of=length)
    cache, blocks = prefill.cache, moved.block_table
    decode.cache.write_block(blocks[0], cache.read_block(run.block_table[0]))
    decode.cache.write_entries(blocks[1], length - BLOCK, cache.read_entries(run.block_table[1], length - BLOCK))
    for layers in (cache.encoder_layers, range(cache.decoder_layers.start, cache.draft_layers.stop)):
        rows = cache.read_window(0, layers, length - WINDOW, length).cpu()
        decode.cache.write_window(2, layers, length - WINDOW, rows)
    if length % 2:
        decode.cache.write_open_pair(2, length - 1, cache.read_open_pair(0, length - 1).cpu())
    moved.advance(text(length))
    drafts = prefill.draft([run.anchor(first)]), decode.draft([moved.anchor(first)])
    assert torch.equal(drafts[0].base_logits, drafts[1].base_logits)
    assert torch.equal(run.run([first], (0,)), moved.run([first], (0,)))


def test_drafts_in_one_batch_give_the_bits_of_drafts_alone() -> None:
    model = device_model()
    runs = [start(model, slot) for slot in range(3)]
    for slot, run in enumerate(runs):
        run.run(text(20 + 9 * slot, slot), ())
    anchors = [run.anchor(40 + run.slot) for run in runs]
    together = model.draft(anchors)
    for i, anchor in enumerate(anchors):
        alone = model.draft([anchor])
        assert torch.equal(alone.base_logits[0], together.base_logits[i])
        assert torch.equal(alone.hidden[0], together.hidden[i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_in_one_loop_gives_the_drafts_of_single_steps(temperature: float) -> None:
    model = device_model()
    runs = [start(model, slot) for slot in range(3)]
    for slot, run in enumerate(runs):
        run.run(text(20 + 9 * slot, slot), ())
    head = model.draft([run.anchor(40 + run.slot) for run in runs])
    previous = torch.tensor([40, 41, 42], device=model.device)
    looped = model.markov_loop(head, previous, choice_of(model, temperature, 3, 0), model.draft_size)
    for j in range(model.draft_size):
        step = model.markov_step(previous, head.base_logits[:, j], head.hidden[:, j])
        previous = choose(step.logits, choice_of(model, temperature, 3, j))
        assert torch.equal(looped.token_ids[:, j], previous)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_fused_head_chooses_what_its_logits_choose(temperature: float) -> None:
    model = device_model()
    hidden = run_all(start(model, 0), text(40), 40)
    choice = choice_of(model, temperature, 40, 0)
    fused = model.choose(hidden, choice)
    assert torch.equal(fused, choose(model.logits(hidden), choice))
    for row in range(0, 40, 7):
        alone = RowChoice(*(part[row : row + 1] for part in fields_of(choice)))
        assert torch.equal(model.choose(hidden[row : row + 1], alone), fused[row : row + 1])


def choice_of(model: Model, temperature: float, rows: int, index: int) -> RowChoice:
    sampling = RowSampling(temperature=temperature)
    return RowChoice.of(
        [SampleRow(sampling=sampling, seed=7 + i, output_index=index) for i in range(rows)], model.device
    )


def fields_of(choice: RowChoice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return choice.inverse_temperature, choice.seeds, choice.positions, choice.is_greedy


def choose(logits: Tensor, choice: RowChoice) -> Tensor:
    from shoal_kernels.ops.sampling import coupled_argmax

    z = torch.where(choice.is_greedy[:, None], logits, logits * choice.inverse_temperature[:, None])
    return coupled_argmax(z, choice.seeds, choice.positions, choice.is_greedy)


def test_a_step_that_ends_in_the_encoder_leaves_the_same_cache() -> None:
    model = device_model()
    run = start(model, 0)
    segment = Segment(slot=0, block_table=[1, 2], start=0, token_ids=text(40), lookback=[2, 2, 2], decoder_start=None)
    assert model.forward(RowBatch(segments=(segment,))).hidden.shape == (0, model.config.hidden_size)
    other = start(model, 1)
    other.run(text(40), ())
    assert model.cache.read_entries(1, 40) == model.cache.read_entries(3, 40)
    run.advance(text(40))
