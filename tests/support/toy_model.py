"""A zero-time `StepModel` whose tokens are a pure function of the prefix, read back from what the engine stored.

Every row's token is written to its block and rings; every hidden row is a hash of the tokens found there. An engine
that shares, copies, frees or addresses blocks or slots wrongly therefore gives other tokens than `toy_output`, or trips
an assertion of the rings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.constraint import Mask
from shoal_engine.events import PositionLogprobs, TokenLogprob
from shoal_engine.logical_rows import RowKind
from shoal_engine.matching import DraftMasks
from shoal_engine.model_port import Draft, DraftStart, ModelShape, Sampled, TokenContext
from shoal_engine.row_rules import banned_ids, bans_beside, forced_id, is_empty, row_mask
from shoal_model.rows import Segment

VOCAB = 97
EOS = 1
WINDOW, BACKTRACK, REPLAY = 16, 6, 24
ENCODER_LAYERS, DECODER_LAYERS, DRAFT_LAYERS = 3, 2, 1
_RECORD = 8
_LAYERS = {
    RowKind.ENCODER_WINDOW: ENCODER_LAYERS,
    RowKind.DECODER_WINDOW: DECODER_LAYERS,
    RowKind.DRAFT_WINDOW: DRAFT_LAYERS,
}


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _prefix_hash(tokens: Sequence[int]) -> int:
    return _hash(np.asarray(tokens, dtype=np.int64).tobytes())


def _token(hidden: int, seed: int, output_index: int, mask: Mask | None = None) -> int | None:
    """The first token of a stream of hashes that the mask allows; None if it allows none."""
    if mask is not None and is_empty(mask, VOCAB):
        return None
    for attempt in range(VOCAB):
        token = _hash(hidden, seed, output_index, attempt) % VOCAB
        if mask is None or mask[token // 32] >> (token % 32) & 1:
            return token
    assert mask is not None
    return next(token for token in range(VOCAB) if mask[token // 32] >> (token % 32) & 1)


def toy_seed(seed: int, choice: int) -> int:
    """The seed of a choice."""
    return seed if choice == 0 else _hash("choice", seed, choice)


def toy_output(prompt: Sequence[int], seed: int, count: int, stops: frozenset[int] = frozenset({EOS})) -> list[int]:
    """What a choice of this seed must say."""
    output: list[int] = []
    while len(output) < count:
        token = _token(_prefix_hash([*prompt, *output]), seed, len(output))
        assert token is not None, "nothing is masked"
        output.append(token)
        if output[-1] in stops:
            break
    return output


class ToyModel:
    """See the module. `draft_quality` out of 100 drafts are right."""

    def __init__(
        self, *, block_count: int = 64, slot_count: int = 8, draft_quality: int = 70, max_context: int = 100_000
    ) -> None:
        self.shape = ModelShape(
            vocab_size=VOCAB,
            max_context=max_context,
            window=WINDOW,
            backtrack=BACKTRACK,
            encoder_layers=ENCODER_LAYERS,
            decoder_layers=DECODER_LAYERS,
            draft_size=5,
            eos_id=EOS,
            pad_id=2,
            block_count=block_count,
            slot_count=slot_count,
            block_bytes=BLOCK_TOKENS * _RECORD,
            has_open_pairs=True,
            hidden_bytes=8,
        )
        self.draft_quality = draft_quality
        self.fail_next_forward = False
        self._blocks = np.full((block_count + 1, BLOCK_TOKENS), -1, dtype=np.int64)
        length = WINDOW + BACKTRACK
        self._tags = {kind: np.full((slot_count, length), -1, dtype=np.int64) for kind in _LAYERS}
        self._rings = {kind: np.full((slot_count, length), -1, dtype=np.int64) for kind in _LAYERS}
        self._pairs: dict[int, tuple[int, int]] = {}
        self.forward_rows: list[int] = []

    def forward(self, segments: Sequence[Segment]) -> list[int]:
        if self.fail_next_forward:
            self.fail_next_forward = False
            raise RuntimeError("the toy was told to fail")
        self.forward_rows.append(sum(len(segment.token_ids) for segment in segments))
        assert len({segment.slot for segment in segments}) == len(segments)
        hidden = []
        for segment in segments:
            hidden += self._run(segment)
        return hidden

    def _run(self, segment: Segment) -> list[int]:
        start, tokens, table = segment.start, list(segment.token_ids), np.asarray(segment.block_table)
        known = [int(token) for token in segment.lookback]
        outputs, hidden = set(segment.outputs), []
        for offset, token in enumerate(tokens):
            position = start + offset
            if position >= segment.entry_start:
                self._blocks[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = token
            self._put(RowKind.ENCODER_WINDOW, segment.slot, position, token)
            low = max(segment.encoder_start, position - WINDOW + 1, 0)
            self._pairs[segment.slot] = (position, int(token))
            prefix = self._blocks[table].reshape(-1)[: position + 1]
            self._check(RowKind.ENCODER_WINDOW, segment.slot, low, prefix)
            expected = [2] * max(0, 3 - position) + prefix[max(0, position - 3) : position].tolist()
            assert known == expected, "look-back differs from the prefix"
            known = [*known[1:], int(token)]
            if segment.decoder_start is not None and position >= segment.decoder_start:
                self._put(RowKind.DECODER_WINDOW, segment.slot, position, token)
                self._put(RowKind.DRAFT_WINDOW, segment.slot, position, token)
                low = max(segment.decoder_window_start, position - WINDOW + 1)
                self._check(RowKind.DECODER_WINDOW, segment.slot, low, prefix)
            if offset in outputs:
                hidden.append(_prefix_hash(prefix))
        return hidden

    def _put(self, kind: RowKind, slot: int, position: int, token: int) -> None:
        place = position % (WINDOW + BACKTRACK)
        self._tags[kind][slot, place], self._rings[kind][slot, place] = position, token

    def _check(self, kind: RowKind, slot: int, low: int, prefix: np.ndarray) -> None:
        positions = np.arange(low, len(prefix))
        places = positions % (WINDOW + BACKTRACK)
        assert np.array_equal(self._tags[kind][slot, places], positions), f"{kind} holds other positions"
        assert np.array_equal(self._rings[kind][slot, places], prefix[low:]), f"{kind} holds other rows"

    def sample(self, hidden: list[int], rows: Sequence[int], contexts: Sequence[TokenContext]) -> list[Sampled]:
        sampled = []
        for row, context in zip(rows, contexts, strict=True):
            mask = row_mask(context.mask, context.banned, forced_id(context.spec, context.output_index), VOCAB)
            token = _token(hidden[row], context.seed, context.output_index, mask)
            if token is None:
                sampled.append(Sampled(0, is_stuck=True))
                continue
            found = None
            if context.spec.top_logprobs is not None:
                found = PositionLogprobs(TokenLogprob(token, -float(context.output_index)), ())
            sampled.append(Sampled(token, found))
        return sampled

    def logprobs(
        self, hidden: list[int], rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[PositionLogprobs]:
        # Values that tell row, token and count apart.
        return [
            PositionLogprobs(TokenLogprob(token, -float(hidden[row] % 1000)), (TokenLogprob(0, -1.0),) * top)
            for row, token in zip(rows, token_ids, strict=True)
        ]

    def draft(self, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        drafts = []
        masks = DraftMasks([start.matcher for start in starts], VOCAB)
        for place, start in enumerate(starts):
            context = start.context
            assumed: list[int] = []
            assert start.position == len(context.prompt) + len(context.output) - 1
            assert start.token_id == context.output[-1]
            assert start.position + self.shape.draft_size <= self.shape.max_context, "a round runs all its positions"
            self._check_draft_window(start)
            for j in range(width):
                prefix = [*context.prompt.tolist(), *context.output, *assumed]
                index = context.output_index + j
                banned = banned_ids(context.spec, start.stop_ids, start.min_tokens, context.output, assumed)
                allowed = masks.mask(place)
                banned = bans_beside(allowed, banned, start.stop_ids, VOCAB)
                mask = row_mask(allowed, banned, forced_id(context.spec, index), VOCAB)
                token = _token(_prefix_hash(prefix), context.seed, index, mask) or 0
                if _hash("draft", context.seed, index) % 100 >= self.draft_quality:
                    token = (token + 1) % VOCAB
                assumed.append(token)
                masks.took(place, token)
            drafts.append(Draft(tuple(assumed), (0.5,) * width))
        masks.close()
        return drafts

    def _check_draft_window(self, start: DraftStart) -> None:
        tokens = np.array([*start.context.prompt.tolist(), *start.context.output[:-1]])
        assert len(tokens) == start.position
        self._check(RowKind.DRAFT_WINDOW, start.slot, max(start.window_start, start.position - WINDOW, 0), tokens)

    def choice_seed(self, seed: int, choice: int) -> int:
        return toy_seed(seed, choice)

    def hidden_to_bytes(self, hidden: list[int], row: int) -> bytes:
        return hidden[row].to_bytes(8, "little")

    def hidden_from_bytes(self, data: bytes) -> list[int]:
        return [int.from_bytes(data, "little")]

    def clear_slot(self, slot: int) -> None:
        for tags in self._tags.values():
            tags[slot] = -1
        self._pairs.pop(slot, None)

    def copy_slot(self, source: int, target: int) -> None:
        for kind in _LAYERS:
            self._tags[kind][target] = self._tags[kind][source]
            self._rings[kind][target] = self._rings[kind][source]
        if source in self._pairs:
            self._pairs[target] = self._pairs[source]

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    def read_block(self, block: int) -> bytes:
        return bytes(self._blocks[block].tobytes())

    def write_block(self, block: int, data: bytes | memoryview) -> None:
        self._blocks[block] = np.frombuffer(data, dtype=np.int64)

    def read_entries(self, block: int, num_tokens: int) -> bytes:
        return bytes(self._blocks[block, :num_tokens].tobytes())

    def write_entries(self, block: int, num_tokens: int, data: bytes | memoryview) -> None:
        if len(data) != num_tokens * _RECORD:
            raise ValueError("wrong size")
        self._blocks[block, :num_tokens] = np.frombuffer(data, dtype=np.int64)

    def window_shape(self, kind: RowKind, positions: int) -> tuple[int, ...]:
        return (_LAYERS[kind], positions, _RECORD)

    def has_window(self, slot: int, kind: RowKind, low: int, high: int) -> bool:
        positions = np.arange(low, high)
        return np.array_equal(self._tags[kind][slot, positions % (WINDOW + BACKTRACK)], positions)

    def read_window(self, slot: int, kind: RowKind, low: int, high: int) -> bytes:
        assert self.has_window(slot, kind, low, high), f"{kind} of {low}..{high} is gone"
        row = self._rings[kind][slot, np.arange(low, high) % (WINDOW + BACKTRACK)]
        rows: bytes = np.stack([row + layer * 1000 for layer in range(_LAYERS[kind])]).tobytes()
        return rows

    def write_window(self, slot: int, kind: RowKind, low: int, high: int, data: bytes | memoryview) -> None:
        rows = np.frombuffer(data, dtype=np.int64).reshape(_LAYERS[kind], high - low)
        for layer, row in enumerate(rows):
            assert np.array_equal(row - layer * 1000, rows[0]), "layers are mixed up"
        for position in range(low, high):
            self._put(kind, slot, position, int(rows[0, position - low]))

    def open_pair_shape(self) -> tuple[int, ...]:
        return (2, 1, 1)

    def read_open_pair(self, slot: int, position: int) -> bytes:
        held, token = self._pairs[slot]
        assert held == position
        assert position % 2 == 0
        return np.array([position, token], dtype=np.float32).tobytes()

    def write_open_pair(self, slot: int, position: int, data: bytes | memoryview) -> None:
        at, token = np.frombuffer(data, dtype=np.float32)
        assert int(at) == position
        self._pairs[slot] = (position, int(token))
