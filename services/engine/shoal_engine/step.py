"""One step: rows of many requests go in, their tokens come out, drafts for the next step are made.

Plain decode is verify with zero drafts; a first token is sampled from the prompt's final hidden row; emitted tokens
that are rerun are chunks with decode visibility. All of them are segments of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic

from shoal_model.segment import Segment

from shoal_engine.acceptance import accept
from shoal_engine.constraint import Mask
from shoal_engine.events import FinishReason, PositionLogprobs, TokenEntry
from shoal_engine.matching import RowMasks, allowed_count, emit, row_masks
from shoal_engine.model_port import DraftStart, Hidden, Sampled, StepModel, TokenContext
from shoal_engine.planner import VerifiedRound
from shoal_engine.requests import GenerationRequest
from shoal_engine.row_rules import banned_ids, bans_beside
from shoal_engine.sequence import RequestState, Sequence
from shoal_engine.token_history import TokenHistory


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The last emitted token of a choice and `width` of its drafts. `plan_index`: its place in the planner's views."""

    state: RequestState
    sequence: Sequence
    width: int
    plan_index: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The next `count` positions of a prompt, or of emitted tokens that are rerun."""

    state: RequestState
    sequence: Sequence
    count: int

    @property
    def is_prompt(self) -> bool:
        return self.sequence.frontier < self.state.prompt_length

    @property
    def completes_prompt(self) -> bool:
        return self.sequence.frontier + self.count == self.state.prompt_length


@dataclass(frozen=True, slots=True)
class FirstRow(Generic[Hidden]):
    """A final hidden row of a prompt, from which choices take their first token."""

    state: RequestState
    hidden: Hidden
    row: int


def context_of(
    state: RequestState,
    sequence: Sequence,
    assumed: SequenceOf[int] = (),
    *,
    ahead: int = 0,
    mask: Mask | None = None,
    vocab: int = 0,
) -> TokenContext:
    """What decides the token at output index len(output) + ahead. `vocab` belongs to a mask."""
    request = state.request
    assert isinstance(request, GenerationRequest), "only choices are sampled"
    index = len(sequence.output) + ahead
    banned = banned_ids(request.params, state.rule.stop_ids, state.rule.min_tokens, sequence.output, assumed)
    return TokenContext(
        spec=request.params,
        seed=state.seeds[sequence.index],
        output_index=index,
        prompt=request.prompt_ids,
        output=sequence.output,
        assumed=assumed,
        history=_history(state, sequence) if request.params.has_penalties else None,
        banned=bans_beside(mask, banned, state.rule.stop_ids, vocab),
        mask=mask,
    )


def _history(state: RequestState, sequence: Sequence) -> TokenHistory:
    if sequence.history is None:
        sequence.history = TokenHistory(state.prompt)
    return sequence.history


def chunk_outputs(rows: ChunkRows) -> range:
    """Rows of a chunk whose hidden rows are wanted: the last of a prompt, or all where the prompt is reported."""
    if rows.is_prompt and rows.state.prompt_logprobs_wanted is not None:
        return range(rows.count)
    return range(rows.count - 1, rows.count) if rows.completes_prompt else range(0)


class Stepper(Generic[Hidden]):
    """Runs steps over one model and keeps the sequences' outputs, frontiers and drafts."""

    def __init__(self, model: StepModel[Hidden], on_frontier: Callable[[RequestState, Sequence, int], None]) -> None:
        """`on_frontier(state, sequence, old)` is called when a choice's frontier has moved from `old`."""
        self._model = model
        self._on_frontier = on_frontier
        self._rounds: list[VerifiedRound] = []

    def forward(self, decodes: SequenceOf[DecodeRows], chunks: SequenceOf[ChunkRows]) -> Hidden:
        """Run the rows. Hidden rows: 1 + width of every decode, then `chunk_outputs` of every chunk."""
        segments = [self._decode_segment(rows) for rows in decodes]
        segments += [self._chunk_segment(rows) for rows in chunks]
        return self._model.forward(segments)

    def verify(self, decodes: SequenceOf[DecodeRows], hidden: Hidden) -> Iterator[tuple[DecodeRows, TokenEntry | None]]:
        """Sample after every decode row, accept drafts, move outputs and frontiers; the new tokens of each choice.

        A choice that cannot go on is marked `is_stuck`; None where it has no new tokens either.
        """
        vocab = self._model.shape.vocab_size
        masks = [row_masks(rows.sequence.matcher, rows.sequence.drafts[: rows.width], vocab) for rows in decodes]
        contexts = [
            context_of(
                rows.state, rows.sequence, rows.sequence.drafts[:ahead], ahead=ahead, mask=mask.at(ahead), vocab=vocab
            )
            for rows, mask in zip(decodes, masks, strict=True)
            for ahead in range(rows.width + 1)
        ]
        if not contexts:
            return
        sampled = self._model.sample(hidden, range(len(contexts)), contexts)
        first = 0
        for rows, mask in zip(decodes, masks, strict=True):
            mine = sampled[first : first + rows.width + 1]
            first += rows.width + 1
            yield rows, self._apply(rows, mine, mask)

    def take_rounds(self) -> list[VerifiedRound]:
        """What became of the drafts since this was last asked."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def report_prompt(self, rows: ChunkRows, hidden: Hidden, first_row: int) -> None:
        """Keep the log-probabilities of the prompt tokens that follow the rows of a chunk; before it is counted."""
        state, start = rows.state, rows.sequence.frontier
        best = state.prompt_logprobs_wanted
        if best is None or not rows.is_prompt:
            return
        following = state.prompt[start + 1 : start + 1 + rows.count].tolist()
        if following:
            places = range(first_row, first_row + len(following))
            state.prompt_logprobs += self._model.logprobs(hidden, places, following, best)

    def first_tokens(
        self, start: FirstRow[Hidden], fresh: SequenceOf[Sequence]
    ) -> list[tuple[Sequence, TokenEntry | None]]:
        """Sample output index 0 of every choice that has no output yet; None and `is_stuck` where none may come."""
        if not fresh:
            return []
        state = start.state
        vocab = self._model.shape.vocab_size
        masks = [row_masks(sequence.matcher, (), vocab) for sequence in fresh]
        contexts = [
            context_of(state, one, mask=mask.at(0), vocab=vocab) for one, mask in zip(fresh, masks, strict=True)
        ]
        sampled = self._model.sample(start.hidden, [start.row] * len(fresh), contexts)
        entries: list[tuple[Sequence, TokenEntry | None]] = []
        for sequence, token, mask in zip(fresh, sampled, masks, strict=True):
            if token.is_stuck or mask.fails_at(0):
                sequence.is_stuck, sequence.failure = True, mask.failure
                entries.append((sequence, None))
                continue
            outcome = accept((), [token.token_id], 0, state.rule)
            emit(sequence, [token.token_id])
            entries.append((sequence, self._entry(state, sequence, [token], 0, outcome.finish_reason)))
        return entries

    def draft(self, choices: SequenceOf[tuple[RequestState, Sequence]], max_width: int) -> int:
        """Make drafts for choices whose frontier stands before their last token; for how many that was possible."""
        starts, targets, widest = [], [], 0
        shape = self._model.shape
        for state, sequence in choices:
            width = draft_cap(state, sequence, min(max_width, shape.draft_size))
            # A round runs all its positions, also those of drafts that nobody wants: all must lie in the context.
            if width and sequence.frontier + shape.draft_size <= shape.max_context:
                starts.append(self._draft_start(state, sequence))
                targets.append((sequence, width))
                widest = max(widest, width)
        if not starts:
            return 0
        for (sequence, width), made in zip(targets, self._model.draft(starts, widest), strict=True):
            width = allowed_count(sequence.matcher, made.token_ids[:width])
            sequence.drafts = list(made.token_ids[:width])
            sequence.confidence_logits = made.confidence_logits[:width]
            sequence.margins = made.margins[:width]
        return len(starts)

    def _decode_segment(self, rows: DecodeRows) -> Segment:
        sequence, state = rows.sequence, rows.state
        assert sequence.slot is not None, "decode rows hold a slot"
        return Segment(
            slot=sequence.slot,
            block_table=sequence.blocks,
            start=sequence.frontier,
            token_ids=[sequence.output[-1], *sequence.drafts[: rows.width]],
            lookback=state.lookback(sequence, sequence.frontier, self._model.shape.pad_id),
            decoder_start=sequence.frontier,
            decoder_window_start=sequence.decoder_window_start,
            outputs=range(rows.width + 1),
        )

    def _chunk_segment(self, rows: ChunkRows) -> Segment:
        sequence, state = rows.sequence, rows.state
        assert sequence.slot is not None, "chunks hold a slot"
        run = state.run if rows.is_prompt else None
        start, end = sequence.frontier, sequence.frontier + rows.count
        decoder_start = max(start, run.decoder_start if run else sequence.decoder_window_start)
        return Segment(
            slot=sequence.slot,
            block_table=sequence.blocks,
            start=start,
            token_ids=state.tokens(sequence, start, end),
            lookback=state.lookback(sequence, start, self._model.shape.pad_id),
            encoder_start=run.encoder_start if run else 0,
            entry_start=run.entry_start if run else 0,
            decoder_start=decoder_start if decoder_start < end else None,
            decoder_window_start=run.decoder_start if run else sequence.decoder_window_start,
            outputs=chunk_outputs(rows),
        )

    def _apply(self, rows: DecodeRows, sampled: SequenceOf[Sampled], masks: RowMasks) -> TokenEntry | None:
        sequence, state = rows.sequence, rows.state
        tokens = [token.token_id for token in sampled]
        outcome = accept(sequence.drafts[: rows.width], tokens, len(sequence.output), state.rule)
        emitted = sampled[: outcome.emitted]
        stuck = [i for i, token in enumerate(emitted) if token.is_stuck or masks.fails_at(i)]
        if stuck:
            # Rows behind an output that never comes do not count, stuck or not.
            outcome, sequence.is_stuck = outcome.below(stuck[0]), True
            sequence.failure = masks.failure if masks.fails_at(stuck[0]) else None
        else:
            right = next((i for i in range(rows.width) if sequence.drafts[i] != tokens[i]), rows.width)
            self._rounds.append(VerifiedRound(rows.plan_index, rows.width, right))
        index, old = len(sequence.output), sequence.frontier
        emit(sequence, tokens[: outcome.emitted])
        sequence.frontier += outcome.frontier
        drafted = len(sequence.drafts)
        sequence.drop_drafts()
        self._on_frontier(state, sequence, old)
        state.drafts.add(drafted, rows.width, outcome.accepted)
        state.decode_steps += 1
        if not outcome.emitted:
            return None
        return self._entry(
            state,
            sequence,
            sampled[: outcome.emitted],
            index,
            outcome.finish_reason,
            drafted=drafted,
            verified=rows.width,
            accepted=outcome.accepted,
        )

    def _entry(
        self,
        state: RequestState,
        sequence: Sequence,
        sampled: SequenceOf[Sampled],
        output_index: int,
        reason: FinishReason | None,
        *,
        drafted: int = 0,
        verified: int = 0,
        accepted: int = 0,
    ) -> TokenEntry:
        logprobs: tuple[PositionLogprobs, ...] = tuple(s.logprobs for s in sampled if s.logprobs is not None)
        cached = None if state.has_entry else state.cached_tokens
        state.has_entry = True
        of_prompt: tuple[PositionLogprobs, ...] = ()
        if output_index == 0 and sequence.index == 0:
            of_prompt, state.prompt_logprobs = tuple(state.prompt_logprobs), []
        return TokenEntry(
            request_id=state.request.request_id,
            attempt=state.request.attempt,
            choice=sequence.index,
            output_index=output_index,
            token_ids=tuple(s.token_id for s in sampled),
            logprobs=logprobs,
            drafted=drafted,
            verified=verified,
            accepted=accepted,
            prompt_logprobs=of_prompt,
            finish_reason=reason,
            cached_tokens=cached,
        )

    def _draft_start(self, state: RequestState, sequence: Sequence) -> DraftStart:
        assert sequence.slot is not None, "drafting holds a slot"
        return DraftStart(
            slot=sequence.slot,
            position=sequence.frontier,
            token_id=sequence.output[-1],
            window_start=sequence.draft_window_start,
            context=context_of(state, sequence),
            stop_ids=state.rule.stop_ids,
            min_tokens=state.rule.min_tokens,
            matcher=sequence.matcher,
        )


def draft_cap(state: RequestState, sequence: Sequence, max_width: int) -> int:
    """Most drafts worth making: one token of the remaining ones comes without a draft."""
    request = state.request
    limit = request.max_width if isinstance(request, GenerationRequest) else 0
    width = max_width if limit is None else min(max_width, limit)
    return max(0, min(width, state.rule.max_tokens - len(sequence.output) - 1))
