"""One forward step over many sequences, and the index tensors that its layers share.

Everything a layer needs to know about positions is worked out here once per step, vectorised over rows: which keys a
row sees, where its own records go, which compressed entries close. Layers then only compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_model.kv_layout import BLOCK_TOKENS
from shoal_model.rings import Ints, Ring, RingWrite
from shoal_model.segment import RowBatch as RowBatch
from shoal_model.segment import Segment as Segment
from shoal_model.state import StateSlots

Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryWrite:
    """Compressed entries that close in this step, for one ratio."""

    members: Tensor  # int64 [ratio, n]: rows of each group, over the batch (ratio 1) or [pair ring | batch] (ratio 2)
    blocks: Tensor  # int64 [n]
    entries: Tensor  # int64 [n], entry inside the block
    positions: Tensor  # int64 [n], RoPE position: ratio * group


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfPlan:
    """What the layers of one half (encoder or decoder) share in a step."""

    positions: Tensor  # int64 [rows]
    row_seq: Tensor  # int32 [rows], row of the block table
    window_index: Tensor  # int32 [rows, window]
    window_write: RingWrite
    num_visible: dict[int, Tensor]  # ratio -> int64 [rows], compressed entries visible to the row

    @property
    def num_rows(self) -> int:
        """Rows of this half."""
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All index tensors of one step."""

    history: Tensor  # int64 [rows, 4]: the row's own token id, then the three before it
    is_image: Tensor  # bool [rows]: rows that Engram leaves alone
    block_table: Tensor  # int32 [segments, max blocks], 0 padded
    encoder: HalfPlan
    entries: dict[int, EntryWrite]  # by ratio
    pair_write: RingWrite
    decoder: HalfPlan | None  # None: no row runs the decoder half
    decoder_rows: Tensor | None  # int64, batch rows that run the decoder; None: all of them
    output_rows: Tensor  # int64, decoder rows whose final hidden row is wanted

    @property
    def token_ids(self) -> Tensor:
        """Token id of every row, int64 [rows]."""
        return self.history[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a model can take: ids and positions outside are refused before any kernel sees them."""

    num_blocks: int
    vocab_size: int
    max_positions: int


def plan_step(
    batch: RowBatch, state: StateSlots, *, window: int, ratios: Sequence[int], limits: StepLimits
) -> StepPlan:
    """Work out a step and mark in `state` the positions it will write. Run the step right after, and only once.

    raises   ValueError for a malformed batch (nothing is marked), StaleRingRead where a ring lacks a needed position
    """
    segments = batch.segments
    _check(segments, state.num_slots, limits)
    rows = _Rows(segments)
    encoder_start = rows.spread([s.encoder_start for s in segments])
    windows = state.encoder.plan_window(rows.slots, rows.positions, rows.first, encoder_start, rows.numbers, window)
    table = _block_table(segments)
    entries = {r: _plan_entries(rows, state.pairs, segments, table, r) for r in ratios}
    decoder, chosen = _plan_decoder(rows, segments, state, window, ratios)
    outputs = _output_rows(rows, segments, chosen)
    encoder = HalfPlan(
        positions=torch.from_numpy(rows.positions),
        row_seq=torch.from_numpy(rows.sequence.astype(np.int32)),
        window_index=windows,
        window_write=state.encoder.plan_write(rows.slots, rows.positions, rows.last, rows.numbers),
        num_visible={r: torch.from_numpy((rows.positions + 1) // r) for r in ratios},
    )
    return StepPlan(
        history=torch.from_numpy(_history(segments)),
        is_image=torch.zeros(len(rows.positions), dtype=torch.bool),
        block_table=torch.from_numpy(table),
        encoder=encoder,
        entries=entries,
        pair_write=state.pairs.plan_write(rows.slots, rows.positions, rows.last, rows.numbers),
        decoder=decoder,
        decoder_rows=None if chosen is None or len(chosen) == len(rows.positions) else torch.from_numpy(chosen),
        output_rows=torch.from_numpy(outputs),
    )


class _Rows:
    """Per-row columns of a batch."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.lengths = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
        total = int(self.lengths.sum())
        self.sequence = np.repeat(np.arange(len(segments)), self.lengths)
        self.first = self.spread([s.start for s in segments])
        self.slots = self.spread([s.slot for s in segments])
        self.last = self.first + self.spread(self.lengths) - 1
        self.numbers = np.arange(total)
        self.offsets = np.cumsum(self.lengths) - self.lengths  # first row of every segment
        self.positions = self.first + self.numbers - self.spread(self.offsets)

    def spread(self, per_segment: Sequence[int] | Ints) -> Ints:
        """One value per segment as one value per row."""
        return np.repeat(np.asarray(per_segment, dtype=np.int64), self.lengths)


def _plan_entries(rows: _Rows, pairs: Ring, segments: Sequence[Segment], table: Table, ratio: int) -> EntryWrite:
    entry_start = rows.spread([s.entry_start for s in segments])
    closing = np.flatnonzero(((rows.positions + 1) % ratio == 0) & (rows.positions >= entry_start))
    positions = rows.positions[closing] - (ratio - 1)  # of each group's first token
    blocks = table[rows.sequence[closing], positions // BLOCK_TOKENS].astype(np.int64)
    if ratio == 1:
        members = closing[None]
    else:
        wanted = positions[None] + np.arange(ratio)[:, None]  # [ratio, n]
        first = rows.first[closing][None]
        older = wanted < first
        places = pairs.tags.places(rows.slots[closing][None], wanted)
        pairs.tags.check(places[older], wanted[older])
        in_batch = pairs.scratch_start + rows.numbers[closing][None] - (ratio - 1) + np.arange(ratio)[:, None]
        members = np.where(older, places, in_batch)
    return EntryWrite(
        members=torch.from_numpy(members),
        blocks=torch.from_numpy(blocks),
        entries=torch.from_numpy(positions % BLOCK_TOKENS // ratio),
        positions=torch.from_numpy(positions),
    )


def _plan_decoder(
    rows: _Rows, segments: Sequence[Segment], state: StateSlots, window: int, ratios: Sequence[int]
) -> tuple[HalfPlan | None, Ints | None]:
    never = np.iinfo(np.int64).max
    start = rows.spread([never if s.decoder_start is None else s.decoder_start for s in segments])
    chosen = np.flatnonzero(rows.positions >= start)
    if not len(chosen):
        return None, None
    slots, positions, last = rows.slots[chosen], rows.positions[chosen], rows.last[chosen]
    first = np.maximum(rows.first, start)[chosen]
    lowest = rows.spread([s.decoder_window_start for s in segments])[chosen]
    numbers = np.arange(len(chosen))
    plan = HalfPlan(
        positions=torch.from_numpy(positions),
        row_seq=torch.from_numpy(rows.sequence[chosen].astype(np.int32)),
        window_index=state.decoder.plan_window(slots, positions, first, lowest, numbers, window),
        window_write=state.decoder.plan_write(slots, positions, last, numbers),
        num_visible={r: torch.from_numpy((positions + 1) // r) for r in ratios},
    )
    # Draft context is written with the decoder's rows, to the same places.
    state.draft.tags.mark(plan.window_write.targets.numpy(), positions[plan.window_write.sources.numpy()])
    return plan, chosen


def _output_rows(rows: _Rows, segments: Sequence[Segment], chosen: Ints | None) -> Ints:
    wanted = np.concatenate(
        [offset + np.asarray(s.outputs, dtype=np.int64) for offset, s in zip(rows.offsets, segments, strict=True)]
    )
    if chosen is None:
        return wanted
    return np.searchsorted(chosen, wanted)


def _history(segments: Sequence[Segment]) -> Ints:
    """Token ids p, p-1, p-2, p-3 of every row, int64 [rows, 4]."""
    parts = [np.asarray(part, dtype=np.int64) for segment in segments for part in (segment.lookback, segment.token_ids)]
    tokens = np.concatenate(parts)
    lengths = np.array([len(segment.token_ids) for segment in segments])
    # A segment's rows begin behind its own look-back and those of the segments before.
    places = np.arange(lengths.sum()) + np.repeat(3 * np.arange(1, len(segments) + 1), lengths)
    return tokens[places[:, None] - np.arange(4)]


def _block_table(segments: Sequence[Segment]) -> Table:
    counts = [-(-(s.start + len(s.token_ids)) // BLOCK_TOKENS) for s in segments]
    table = np.zeros((len(segments), max(counts)), dtype=np.int32)
    for row, (segment, count) in enumerate(zip(segments, counts, strict=True)):
        table[row, :count] = segment.block_table[:count]
    return table


def _check(segments: Sequence[Segment], num_slots: int, limits: StepLimits) -> None:
    if not segments:
        raise ValueError("a batch has at least one segment")
    if len({s.slot for s in segments}) != len(segments):
        raise ValueError("a batch holds at most one segment of a slot")
    for segment in segments:
        if not 0 <= segment.slot < num_slots:
            raise ValueError(f"slot {segment.slot} is not in [0, {num_slots})")
        problem = _problem(segment, limits)
        if problem:
            raise ValueError(f"slot {segment.slot}: {problem}")


def _problem(segment: Segment, limits: StepLimits) -> str | None:
    """What is wrong with a segment. Compiled kernels trust block and token ids, so they are checked here."""
    length, end = len(segment.token_ids), segment.start + len(segment.token_ids)
    if length < 1 or segment.start < 0 or end > limits.max_positions:
        return f"{length} rows from position {segment.start}, of {limits.max_positions} positions"
    if len(segment.lookback) != 3:
        return f"three token ids of look-back expected, got {len(segment.lookback)}"
    if not _all_within((*segment.token_ids, *segment.lookback), 0, limits.vocab_size):
        return f"a token id is not in [0, {limits.vocab_size})"
    num_blocks = -(-end // BLOCK_TOKENS)
    if len(segment.block_table) < num_blocks:
        return f"{len(segment.block_table)} blocks do not cover position {end - 1}"
    if not _all_within(segment.block_table[:num_blocks], 1, limits.num_blocks):
        return f"a block id is not in [1, {limits.num_blocks})"
    outputs = list(segment.outputs)
    lowest = end if segment.decoder_start is None else max(segment.decoder_start - segment.start, 0)
    if outputs != sorted(set(outputs)) or (outputs and not (lowest <= outputs[0] and outputs[-1] < length)):
        return f"outputs {outputs} are not ascending decoder rows of {length} rows"
    return None


def _all_within(values: Sequence[int] | Ints, low: int, high: int) -> bool:
    array = np.asarray(values)
    return bool(array.min() >= low and array.max() < high)
