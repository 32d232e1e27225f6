"""A row's bits depend on its own inputs only: not on chunks, batch mates, row order, drafts or where KV came from.

All on the golden tiny model in precision SERVED, bit for bit.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from shoal_kernels import registry
from shoal_model.model import Model
from shoal_model.rows import RowBatch, Segment
from shoal_model.sequence import SequenceRun
from support.seldom import seldom
from support.tiny_model import REPLAY, WINDOW, text, tiny_model
from torch import Tensor

LENGTH = 150
BLOCK = 128


def start(model: Model, slot: int, *, replay_of: int | None = None) -> SequenceRun:
    """A sequence in its own slot and blocks, with replay over a prompt of `replay_of` tokens."""
    return SequenceRun(
        model,
        slot=slot,
        block_table=[1 + 2 * slot, 2 + 2 * slot],
        prompt_length=replay_of,
        replay_length=None if replay_of is None else REPLAY,
    )


def run_all(run: SequenceRun, tokens: list[int], chunk: int) -> Tensor:
    return torch.cat(
        [run.run(tokens[i : i + chunk], range(len(tokens[i : i + chunk]))) for i in range(0, len(tokens), chunk)]
    )


@cache
def whole(length: int = LENGTH, salt: int = 0) -> Tensor:
    """Hidden rows of a text, run as one chunk."""
    return run_all(start(tiny_model(), 0), text(length, salt), length)


@pytest.mark.parametrize("chunk", [7, 128, *seldom(1, 16)])
def test_chunks_of_any_size_give_the_same_bits(chunk: int) -> None:
    assert torch.equal(run_all(start(tiny_model(), 1), text(LENGTH), chunk), whole())


def test_rows_mixed_with_other_sequences_give_the_same_bits() -> None:
    model, random = tiny_model(), Random(1)
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


@pytest.mark.parametrize("length", [1, 2, 16, 24, 33, 129, *seldom(3, 15, 17, 23, 25, 26, 32, 39, 40, 127, 128, 130)])
def test_every_boundary_length_decodes_as_the_whole_forward(length: int) -> None:
    """Lengths around the window, the replay, ratio 2, the top-k threshold, candidate blocks and the KV block."""
    tokens = text(length + 4)
    once = start(tiny_model(), 0, replay_of=length)
    expected = once.run(tokens, range(length - 1, length + 4))
    model = tiny_model()
    run = start(model, 0, replay_of=length)
    steps = [run.run_chunks(tokens[:length], 13)]
    steps += [run.run([token], (0,)) for token in tokens[length:]]
    assert torch.equal(torch.cat(steps), expected)


@pytest.mark.parametrize("length", [40, LENGTH])
def test_compact_replay_equals_the_mask_over_all_rows(length: int) -> None:
    tokens, first = text(length), length - REPLAY
    rows = range(first, length)
    compact = start(tiny_model(), 0, replay_of=length).run(tokens, rows)
    segment = Segment(
        slot=0,
        block_table=[1, 2],
        start=0,
        token_ids=tokens,
        lookback=[2, 2, 2],
        decoder_start=0,
        decoder_window_start=first,
        outputs=rows,
    )
    masked = tiny_model().forward(RowBatch(segments=(segment,))).hidden
    assert torch.equal(compact, masked)
    assert not torch.equal(compact, whole(length)[first:])


def greedy_tokens(model: Model, run: SequenceRun, token: int, count: int) -> list[int]:
    tokens = [token]
    while len(tokens) < count:
        tokens.append(int(model.logits(run.run(tokens[-1:], (0,)))[0].argmax()))
    return tokens


def prefilled(model: Model, slot: int, length: int) -> tuple[SequenceRun, int]:
    run = start(model, slot, replay_of=length)
    hidden = run.run_chunks(text(length), 64)
    return run, int(model.logits(hidden)[0].argmax())


def test_verify_rows_give_the_bits_of_plain_rows_after_rejections() -> None:
    tokens, model, random = text(60), tiny_model(), Random(3)
    run, hidden = start(model, 0), []
    while run.length < 60:
        base = run.length
        good = tokens[base : base + random.randint(1, 6)]
        rows = good + [random.randrange(512) for _ in range(6 - len(good))]
        hidden.append(run.run(rows, range(6))[: len(good)])
        run.rewind(base + len(good))
    assert torch.equal(torch.cat(hidden), whole(60))


def encoder_window(run: SequenceRun, high: int) -> Tensor:
    cache = run.model.cache
    return cache.read_window(run.slot, cache.encoder_layers, high - WINDOW, high)


def test_a_prefix_hit_with_restored_windows_equals_a_cold_prefill() -> None:
    length = BLOCK + REPLAY + 3
    tokens = text(length)
    model = tiny_model()
    cold = start(model, 0, replay_of=length)
    cold.run(tokens[:BLOCK], ())
    snapshot, block = encoder_window(cold, BLOCK), model.cache.read_block(1)
    expected = cold.run(tokens[BLOCK:], range(3, length - BLOCK))
    other = tiny_model()
    hit = start(other, 3, replay_of=length)
    other.cache.write_block(7, block)
    other.cache.write_window(3, other.cache.encoder_layers, BLOCK - WINDOW, snapshot)
    hit.advance(tokens[:BLOCK])
    assert torch.equal(hit.run(tokens[BLOCK:], range(3, length - BLOCK)), expected)


def test_warm_replay_rebuilds_the_snapshot_of_a_cold_prefill() -> None:
    tokens = text(BLOCK)
    model = tiny_model()
    cold = start(model, 0)
    cold.run(tokens, ())
    first = BLOCK - len(model.cache.encoder_layers) * WINDOW
    assert first > 0
    before = model.cache.read_block(1)
    warm = start(model, 1)
    warm.block_table = [1]
    warm.advance(tokens[:first])
    for low in range(first, BLOCK, 29):
        part = tokens[low : min(low + 29, BLOCK)]
        segment = Segment(
            slot=1,
            block_table=[1],
            start=low,
            token_ids=part,
            lookback=warm.lookback(low),
            encoder_start=first,
            entry_start=BLOCK,
            decoder_start=None,
        )
        model.forward(RowBatch(segments=(segment,)))
        warm.advance(part)
    assert torch.equal(encoder_window(warm, BLOCK), encoder_window(cold, BLOCK))
    assert model.cache.read_block(1) == before


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_a_hand_over_of_logical_rows_equals_the_same_instance(length: int) -> None:
    prefill = tiny_model()
    run, first = prefilled(prefill, 0, length)
    decode = tiny_model()
    moved = start(decode, 2, replay_of=length)
    cache, blocks = prefill.cache, moved.block_table
    decode.cache.write_block(blocks[0], cache.read_block(run.block_table[0]))
    decode.cache.write_entries(blocks[1], length - BLOCK, cache.read_entries(run.block_table[1], length - BLOCK))
    for layers in (cache.encoder_layers, range(cache.decoder_layers.start, cache.draft_layers.stop)):
        rows = cache.read_window(0, layers, length - WINDOW, length)
        decode.cache.write_window(2, layers, length - WINDOW, rows)
    if length % 2:
        decode.cache.write_open_pair(2, length - 1, cache.read_open_pair(0, length - 1))
    moved.advance(text(length))
    anchors = [run.anchor(first)], [moved.anchor(first)]
    assert torch.equal(prefill.draft(anchors[0]).base_logits, decode.draft(anchors[1]).base_logits)
    assert greedy_tokens(decode, moved, first, 6) == greedy_tokens(prefill, run, first, 6)
    assert torch.equal(run.run([5], (0,)), moved.run([5], (0,)))


def test_drafts_in_one_batch_give_the_bits_of_drafts_alone() -> None:
    model = tiny_model()
    runs = [start(model, slot) for slot in range(3)]
    for slot, run in enumerate(runs):
        run.run(text(20 + 9 * slot, slot), ())
    anchors = [run.anchor(40 + run.slot) for run in runs]
    together = model.draft(anchors)
    for i, anchor in enumerate(anchors):
        alone = model.draft([anchor])
        assert torch.equal(alone.base_logits[0], together.base_logits[i])
        assert torch.equal(alone.hidden[0], together.hidden[i])


def test_an_empty_draft_window_changes_drafts_but_no_target_row() -> None:
    model = tiny_model()
    run = start(model, 0)
    run.run(text(40), ())
    anchor = run.anchor(9)
    forgotten = type(anchor)(slot=0, position=40, token_id=9, window_start=40)
    assert not torch.equal(model.draft([anchor]).base_logits, model.draft([forgotten]).base_logits)
    assert torch.equal(run.run([text(41)[40]], (0,)), whole(41)[40:])


def test_compiled_and_reference_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    references = {op: entries[-1:] for op, entries in registry.IMPLEMENTATIONS.items()}
    assert all(entry.backend == "reference" for entries in references.values() for entry in entries)
    expected = whole(40)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", references)
    monkeypatch.setattr(registry, "_chosen", {})
    run = start(tiny_model(), 0)
    assert torch.equal(run_all(run, text(40), 40), expected)
    drafted = run.model.draft([run.anchor(9)]).base_logits
    monkeypatch.undo()
    assert torch.equal(run.model.draft([run.anchor(9)]).base_logits, drafted)


@pytest.mark.parametrize("spare", [0, -1])
def test_decoder_rows_outside_the_cone_of_the_last_row_may_be_skipped(spare: int) -> None:
    """Row e reads decoder rows down to e - D * (W - 1) and no further: one row less changes it."""
    tokens, model = text(LENGTH), tiny_model()
    last = LENGTH - 1
    first = last - len(model.cache.decoder_layers) * (WINDOW - 1) - spare
    segment = Segment(
        slot=0,
        block_table=[1, 2],
        start=0,
        token_ids=tokens,
        lookback=[2, 2, 2],
        decoder_start=first,
        decoder_window_start=first,
        outputs=(last,),
    )
    hidden = model.forward(RowBatch(segments=(segment,))).hidden
    assert torch.equal(hidden, whole()[last:]) == (spare == 0)
