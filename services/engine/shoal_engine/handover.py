"""Logical rows in and out of a request: prefix hits, prompts prefilled elsewhere, and rows of those prefilled here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Generic

from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.errors import BadRows
from shoal_engine.logical_rows import LogicalRows, PrefixRows, RowKind
from shoal_engine.model_port import Hidden, StepModel
from shoal_engine.replay import check_hit
from shoal_engine.sequence import RequestState, Sequence
from shoal_engine.snapshots import floor_to_block, snapshot_position, window_pieces

WINDOWS = (RowKind.ENCODER_WINDOW, RowKind.DECODER_WINDOW, RowKind.DRAFT_WINDOW)


def lead_of(state: RequestState) -> tuple[Sequence, int]:
    """The sequence in which the prompt of a holding request runs, and its slot."""
    lead = state.lead
    assert lead is not None, "only called while a prompt is being loaded or run"
    assert lead.slot is not None, "the lead keeps its slot while the prompt needs it"
    return lead, lead.slot


class Importer(Generic[Hidden]):
    """Loads rows into the lead sequence of an admitted request. Raises BadRows where they do not fit."""

    def __init__(self, model: StepModel[Hidden], replay_length: int) -> None:
        self._model = model
        self._replay_length = replay_length

    def prefix(self, state: RequestState, prefix: PrefixRows) -> None:
        """Blocks and snapshot of a hit, in place of any loaded before. Raises HitNotUsable, BadRows."""
        hit, shape = prefix.hit_tokens, self._model.shape
        check_hit(hit, state.prompt_length, self._replay_length)
        if len(prefix.blocks) != hit // BLOCK_TOKENS:
            raise BadRows(f"a hit of {hit} tokens has {hit // BLOCK_TOKENS} blocks, got {len(prefix.blocks)}")
        for data in prefix.blocks:
            _expect("block", len(data), shape.block_bytes)
        low = max(0, hit - shape.window)
        if prefix.encoder_window is not None:
            _expect("snapshot", len(prefix.encoder_window), self._window_bytes(RowKind.ENCODER_WINDOW, hit - low))
        lead, slot = lead_of(state)
        self._model.clear_slot(slot)
        for block, data in zip(lead.blocks, prefix.blocks, strict=False):
            self._model.write_block(block, data)
        if prefix.encoder_window is not None and hit:
            self._model.write_window(slot, RowKind.ENCODER_WINDOW, low, hit, prefix.encoder_window)
        state.loaded.clear()
        state.hit_tokens = state.cached_tokens = hit
        state.has_snapshot = prefix.encoder_window is not None or hit == 0
        state.branch_tokens = prefix.branch_tokens
        state.exported_blocks = hit // BLOCK_TOKENS

    def rows(self, state: RequestState, rows: SequenceOf[LogicalRows]) -> None:
        """Rows of a prompt that is prefilled elsewhere. Raises BadRows; rows before the bad one are loaded."""
        for part in rows:
            self._check(state, part)
            self._load(state, part)
            state.loaded.add((part.kind, part.position_begin))

    def check_complete(self, state: RequestState) -> None:
        """Raises BadRows when something that decode needs was never loaded. Draft windows may be missing."""
        length, shape = state.prompt_length, self._model.shape
        _, slot = lead_of(state)
        missing = [
            begin
            for begin in range(state.hit_tokens, floor_to_block(length), BLOCK_TOKENS)
            if (RowKind.BLOCK, begin) not in state.loaded
        ]
        if missing:
            raise BadRows(f"{len(missing)} blocks of the prompt are missing, the first at position {missing[0]}")
        if length % BLOCK_TOKENS and (RowKind.PARTIAL_BLOCK, floor_to_block(length)) not in state.loaded:
            raise BadRows(f"the last {length % BLOCK_TOKENS} entries of the prompt are missing")
        low = max(0, length - shape.window)
        for kind in (RowKind.ENCODER_WINDOW, RowKind.DECODER_WINDOW):
            if not self._model.has_window(slot, kind, low, length):
                raise BadRows(f"{kind.value} rows of positions {low} to {length - 1} are missing")
        if length % 2 and shape.has_open_pairs and (RowKind.OPEN_PAIR, length - 1) not in state.loaded:
            raise BadRows(f"the open pair at position {length - 1} is missing")

    def _check(self, state: RequestState, part: LogicalRows) -> None:
        begin, end, length = part.position_begin, part.position_end, state.prompt_length
        inside = 0 <= begin < end <= length
        if part.kind is RowKind.BLOCK:
            fits, size = begin % BLOCK_TOKENS == 0 and end == begin + BLOCK_TOKENS, self._model.shape.block_bytes
        elif part.kind is RowKind.PARTIAL_BLOCK:
            fits, size = begin == floor_to_block(length) and end == length, len(part.data)
        elif part.kind is RowKind.OPEN_PAIR:
            fits, size = begin % 2 == 0 and end == begin + 1 == length, _size(self._model.open_pair_shape()) * 4
        else:
            fits, size = True, self._window_bytes(part.kind, end - begin)
        if not (inside and fits):
            raise BadRows(f"{part.kind.value} rows of positions {begin} to {end - 1} do not fit a prompt of {length}")
        _expect(part.kind.value, len(part.data), size)

    def _load(self, state: RequestState, part: LogicalRows) -> None:
        lead, slot = lead_of(state)
        begin, end = part.position_begin, part.position_end
        if part.kind is RowKind.BLOCK:
            self._model.write_block(lead.blocks[begin // BLOCK_TOKENS], part.data)
        elif part.kind is RowKind.PARTIAL_BLOCK:
            try:
                self._model.write_entries(lead.blocks[begin // BLOCK_TOKENS], end - begin, part.data)
            except ValueError as error:
                raise BadRows(str(error)) from error
        elif part.kind is RowKind.OPEN_PAIR:
            self._model.write_open_pair(slot, begin, part.data)
        elif part.kind is RowKind.ENCODER_WINDOW:
            self._load_encoder_window(lead, slot, part, state.request.export_chain)
        else:
            self._model.write_window(slot, part.kind, begin, end, part.data)

    def _load_encoder_window(self, lead: Sequence, slot: int, part: LogicalRows, keeps_copies: bool) -> None:
        """Write the rows piece by piece, so that the window of every multiple of 128 can be copied aside."""
        begin, end, kind = part.position_begin, part.position_end, part.kind
        layers, positions, record = self._model.window_shape(kind, end - begin)
        view = memoryview(part.data).cast("B")
        low = begin
        while low < end:
            high = min(floor_to_block(low) + BLOCK_TOKENS, end)
            rows = b"".join(
                view[(layer * positions + low - begin) * record : (layer * positions + high - begin) * record]
                for layer in range(layers)
            )
            self._model.write_window(slot, kind, low, high, rows)
            start = max(0, high - self._model.shape.window)
            if keeps_copies and high % BLOCK_TOKENS == 0 and self._model.has_window(slot, kind, start, high):
                lead.copies.add(high, self._model.read_window(slot, kind, start, high))
            low = high

    def _window_bytes(self, kind: RowKind, positions: int) -> int:
        return _size(self._model.window_shape(kind, positions))


class Exporter(Generic[Hidden]):
    """Takes rows out of a prompt that was run here, as they become final."""

    def __init__(self, model: StepModel[Hidden], replay_length: int) -> None:
        self._model = model
        self._replay_length = replay_length

    def blocks(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """Bytes of the sequence's blocks first .. end - 1."""
        return [self._model.read_block(block) for block in sequence.blocks[first:end]]

    def snapshot(self, sequence: Sequence, position: int) -> bytes:
        """Encoder rows of the window that ends at `position`; its rings must still hold it."""
        assert sequence.slot is not None, "only read while the sequence holds a slot"
        low = max(0, position - self._model.shape.window)
        return self._model.read_window(sequence.slot, RowKind.ENCODER_WINDOW, low, position)

    def window_piece(self, state: RequestState, end: int) -> list[LogicalRows]:
        """The piece of the encoder's window rows that a hand-over carries and that ends at `end`, if there is one."""
        pieces = window_pieces(state.prompt_length, self._replay_length, self._model.shape.window)
        return [self._window(state, RowKind.ENCODER_WINDOW, low, high) for low, high in pieces if high == end]

    def block_rows(self, first: int, blocks: SequenceOf[bytes]) -> list[LogicalRows]:
        """Full blocks, the first of them at block index `first`."""
        return [
            LogicalRows(
                kind=RowKind.BLOCK,
                position_begin=(first + i) * BLOCK_TOKENS,
                position_end=(first + i + 1) * BLOCK_TOKENS,
                shape=(len(data),),
                dtype="uint8",
                data=data,
            )
            for i, data in enumerate(blocks)
        ]

    def final_rows(self, state: RequestState) -> list[LogicalRows]:
        """What a finished prompt hands over besides full blocks and encoder windows."""
        length, (lead, slot) = state.prompt_length, lead_of(state)
        rows: list[LogicalRows] = []
        if length % BLOCK_TOKENS:
            begin = floor_to_block(length)
            data = self._model.read_entries(lead.blocks[begin // BLOCK_TOKENS], length - begin)
            rows.append(
                LogicalRows(
                    kind=RowKind.PARTIAL_BLOCK,
                    position_begin=begin,
                    position_end=length,
                    shape=(len(data),),
                    dtype="uint8",
                    data=data,
                )
            )
        low = max(0, length - self._model.shape.window)
        rows.append(self._window(state, RowKind.DECODER_WINDOW, low, length))
        if self._model.shape.draft_size:
            rows.append(self._window(state, RowKind.DRAFT_WINDOW, low, length))
        if length % 2 and self._model.shape.has_open_pairs:
            rows.append(
                LogicalRows(
                    kind=RowKind.OPEN_PAIR,
                    position_begin=length - 1,
                    position_end=length,
                    shape=self._model.open_pair_shape(),
                    dtype="float32",
                    data=self._model.read_open_pair(slot, length - 1),
                )
            )
        return rows

    def keep_copy(self, sequence: Sequence, position: int) -> bytes:
        """Copy the window that ends at `position` aside; returns its rows."""
        rows = self.snapshot(sequence, position)
        sequence.copies.add(position, rows)
        return rows

    def stored_position(self, length: int) -> int:
        """S(length)."""
        return snapshot_position(length, self._replay_length)

    def _window(self, state: RequestState, kind: RowKind, low: int, high: int) -> LogicalRows:
        _, slot = lead_of(state)
        return LogicalRows(
            kind=kind,
            position_begin=low,
            position_end=high,
            shape=self._model.window_shape(kind, high - low),
            dtype="uint8",
            data=self._model.read_window(slot, kind, low, high),
        )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _expect(what: str, got: int, want: int) -> None:
    if got != want:
        raise BadRows(f"{what}: {want} bytes expected, got {got}", wanted_bytes=want, got_bytes=got)
