"""The real model behind the engine's port: V4.1 in served precision, the coupled sampler, DSpark drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from shoal_kernels import self_test
from shoal_kernels.ops.sampling import choice_seed
from shoal_model.device import DoesNotFit, open_device
from shoal_model.draft import Anchor, DraftHead
from shoal_model.model import Model
from shoal_model.sampler import RowChoice, model_logprobs, sample
from shoal_model.segment import RowBatch, Segment
from shoal_model.shipping import ship
from shoal_model.synthetic import Synthetic
from torch import Tensor

from shoal_engine.constraint import Mask
from shoal_engine.errors import NotEnoughMemory
from shoal_engine.events import PositionLogprobs
from shoal_engine.logical_rows import RowKind
from shoal_engine.matching import DraftMasks
from shoal_engine.model_port import Draft, DraftStart, ModelShape, Sampled, TokenContext
from shoal_engine.row_rules import banned_ids, bans_beside
from shoal_engine.sample_rows import draft_row, is_plain, position_logprobs, sample_row

_LOGIT_ROWS = 64
"""Rows of a prompt whose logits are in memory at once."""


class ServedModel:
    """A `StepModel` over `shoal_model.Model`. Hidden rows are [n, D] tensors on the model's device."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache = model.cache
        config = model.config
        self._layers = {
            RowKind.ENCODER_WINDOW: model.cache.encoder_layers,
            RowKind.DECODER_WINDOW: model.cache.decoder_layers,
            RowKind.DRAFT_WINDOW: model.cache.draft_layers,
        }
        self._shape = ModelShape(
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            window=config.sliding_window,
            backtrack=model.backtrack,
            encoder_layers=config.boundary,
            decoder_layers=config.num_hidden_layers - config.boundary,
            draft_size=model.draft_size,
            eos_id=config.eos_token_id,
            pad_id=config.engram.pad_token_id if config.engram else config.pad_token_id,
            block_count=model.cache.num_blocks - 1,
            slot_count=model.cache.num_slots,
            block_bytes=model.cache.block_bytes,
            has_open_pairs=bool(model.cache.state.pair_layers),
            hidden_bytes=2 * config.hidden_size,
        )

    @classmethod
    def load(
        cls, directory: str | Path, *, block_count: int, slot_count: int, device: torch.device | str = "cpu"
    ) -> ServedModel:
        """Read a checkpoint folder; `block_count` usable blocks.

        raises   CheckpointError; KernelMismatch: the kernels give other bits here than they are defined to; ValueError
                 for no name of a device; DeviceUnavailable; NotEnoughMemory
        """
        return cls._checked(
            device,
            lambda opened: Model.load(directory, device=opened, num_blocks=block_count + 1, num_slots=slot_count),
        )

    @classmethod
    def synthetic(
        cls, synthetic: Synthetic, *, block_count: int, slot_count: int, device: torch.device | str = "cpu"
    ) -> ServedModel:
        """A model of random weights. Raises as `load`, and ValueError for sizes that are not there."""
        return cls._checked(
            device,
            lambda opened: Model.synthetic(synthetic, device=opened, num_blocks=block_count + 1, num_slots=slot_count),
        )

    @classmethod
    def _checked(cls, device: torch.device | str, build: Callable[[torch.device], Model]) -> ServedModel:
        opened = open_device(device)
        self_test(opened)
        try:
            return cls(build(opened))
        except DoesNotFit as error:
            raise NotEnoughMemory(str(error), wanted_bytes=error.wanted, free_bytes=error.free) from error

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._model.device

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        return self._model.forward(RowBatch(segments=tuple(segments))).hidden

    @torch.inference_mode()
    def sample(self, hidden: Tensor, rows: Sequence[int], contexts: Sequence[TokenContext]) -> list[Sampled]:
        chosen = [sample_row(context, self._shape.vocab_size) for context in contexts]
        plain = {i: row for i, row in enumerate(chosen) if row is not None and is_plain(row)}
        others = {i: row for i, row in enumerate(chosen) if row is not None and i not in plain}
        sampled = [Sampled(0, is_stuck=True)] * len(chosen)
        parts, found = [], dict[int, PositionLogprobs | None]()
        if plain:
            choice = RowChoice.of([*plain.values()], hidden.device)
            parts.append(self._model.choose(_pick(hidden, [rows[i] for i in plain]), choice))
        if others:
            logits = self._model.logits(_pick(hidden, [rows[i] for i in others]))
            result = sample(logits, [*others.values()], in_place=True)
            parts.append(result.token_ids)
            found = dict(zip(others, map(position_logprobs, result.token_ids.tolist(), result.logprobs), strict=True))
        for i, token in zip([*plain, *others], torch.cat(parts).tolist() if parts else (), strict=True):
            sampled[i] = Sampled(token, found.get(i))
        return sampled

    @torch.inference_mode()
    def logprobs(
        self, hidden: Tensor, rows: Sequence[int], token_ids: Sequence[int], top: int
    ) -> list[PositionLogprobs]:
        found: list[PositionLogprobs] = []
        for start in range(0, len(rows), _LOGIT_ROWS):
            part, ids = rows[start : start + _LOGIT_ROWS], token_ids[start : start + _LOGIT_ROWS]
            values = model_logprobs(self._model.logits(_pick(hidden, part)), ids, top)
            found += [one for one in map(position_logprobs, ids, values) if one is not None]
        return found

    @torch.inference_mode()
    def draft(self, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        anchors = [
            Anchor(slot=s.slot, position=s.position, token_id=s.token_id, window_start=s.window_start) for s in starts
        ]
        head = self._model.draft(anchors)
        vocab = self._shape.vocab_size
        first = [draft_row(_ahead(start, [], None, vocab), vocab) for start in starts]
        # What a plain first draft allows later ones allow too, but for what depends on the drafts before them.
        plain = [
            i
            for i, (start, row) in enumerate(zip(starts, first, strict=True))
            if row.sampling.is_plain and not start.context.spec.bad_words and start.matcher is None
        ]
        others = sorted({*range(len(starts))} - {*plain})
        drafts: dict[int, Draft] = {}
        if plain:
            previous = ship(torch.tensor([starts[i].token_id for i in plain], dtype=torch.int64), self._model.device)
            choice = RowChoice.of([first[i] for i in plain], self._model.device)
            loop = self._model.markov_loop(_pick_head(head, plain), previous, choice, width)
            made = (loop.token_ids.tolist(), loop.confidence_logits.tolist(), loop.margins.tolist())
            for i, ids, values, margins in zip(plain, *made, strict=True):
                drafts[i] = Draft(tuple(ids), tuple(values), () if math.isnan(margins[0]) else tuple(margins))
        if others:
            stepped = self._draft_stepwise(_pick_head(head, others), [starts[i] for i in others], width)
            drafts |= zip(others, stepped, strict=True)
        return [drafts[i] for i in range(len(starts))]

    def _draft_stepwise(self, head: DraftHead, starts: Sequence[DraftStart], width: int) -> list[Draft]:
        """Drafts of rows whose logits are edited by the drafts before, or filtered."""
        drafted: list[list[int]] = [[] for _ in starts]
        confidence: list[list[float]] = [[] for _ in starts]
        margins: list[list[float]] = [[] for _ in starts]
        previous = [s.token_id for s in starts]
        masks = DraftMasks([start.matcher for start in starts], self._shape.vocab_size)
        for j in range(width):
            before = ship(torch.tensor(previous, dtype=torch.int64), self._model.device)
            step = self._model.markov_step(before, head.base_logits[:, j], head.hidden[:, j])
            vocab = step.logits.shape[1]
            rows = [
                draft_row(_ahead(start, assumed, masks.mask(i), vocab), vocab)
                for i, (start, assumed) in enumerate(zip(starts, drafted, strict=True))
            ]
            chosen = sample(step.logits, rows, in_place=True, wants_margins=True)
            previous = chosen.token_ids.tolist()
            logits = step.confidence_logit.tolist()
            won_by = [] if chosen.margins is None else chosen.margins.tolist()
            for i, token in enumerate(previous):
                masks.took(i, token)
                drafted[i].append(token)
                confidence[i].append(logits[i])
                margins[i] += won_by[i : i + 1]
        masks.close()
        return [Draft(tuple(d), tuple(c), tuple(m)) for d, c, m in zip(drafted, confidence, margins, strict=True)]

    def choice_seed(self, seed: int, choice: int) -> int:
        return choice_seed(seed, choice)

    @torch.inference_mode()
    def hidden_to_bytes(self, hidden: Tensor, row: int) -> bytes:
        return hidden[row].to(torch.bfloat16).view(torch.uint8).cpu().numpy().tobytes()

    @torch.inference_mode()
    def hidden_from_bytes(self, data: bytes) -> Tensor:
        values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        return values.to(self._model.precision.dtype)[None].to(self._model.device)

    def clear_slot(self, slot: int) -> None:
        self._cache.clear_slot(slot)

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int) -> None:
        self._cache.copy_slot(source, target)

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        self._cache.copy_block(source, target)

    @torch.inference_mode()
    def read_block(self, block: int) -> bytes:
        return self._cache.read_block(block)

    @torch.inference_mode()
    def write_block(self, block: int, data: bytes | memoryview) -> None:
        self._cache.write_block(block, data)

    @torch.inference_mode()
    def read_entries(self, block: int, num_tokens: int) -> bytes:
        return self._cache.read_entries(block, num_tokens)

    @torch.inference_mode()
    def write_entries(self, block: int, num_tokens: int, data: bytes | memoryview) -> None:
        self._cache.write_entries(block, num_tokens, data)

    def window_shape(self, kind: RowKind, positions: int) -> tuple[int, ...]:
        return (len(self._layers[kind]), positions, self._cache.window_row_bytes)

    def has_window(self, slot: int, kind: RowKind, low: int, high: int) -> bool:
        return self._cache.has_window(slot, self._layers[kind], low, high)

    @torch.inference_mode()
    def read_window(self, slot: int, kind: RowKind, low: int, high: int) -> bytes:
        return _to_bytes(self._cache.read_window(slot, self._layers[kind], low, high))

    @torch.inference_mode()
    def write_window(self, slot: int, kind: RowKind, low: int, high: int, data: bytes | memoryview) -> None:
        records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self.window_shape(kind, high - low))
        self._cache.write_window(slot, self._layers[kind], low, records)

    def open_pair_shape(self) -> tuple[int, ...]:
        return (len(self._cache.state.pair_layers), 2, self._model.config.head_dim)

    @torch.inference_mode()
    def read_open_pair(self, slot: int, position: int) -> bytes:
        return _to_bytes(self._cache.read_open_pair(slot, position))

    @torch.inference_mode()
    def write_open_pair(self, slot: int, position: int, data: bytes | memoryview) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).view(self.open_pair_shape())
        self._cache.write_open_pair(slot, position, values)


def _to_bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _ahead(start: DraftStart, assumed: list[int], mask: Mask | None, vocab: int) -> TokenContext:
    """What decides the draft after `assumed`."""
    context, index = start.context, start.context.output_index + len(assumed)
    banned = banned_ids(context.spec, start.stop_ids, start.min_tokens, context.output, assumed)
    return TokenContext(
        spec=context.spec,
        seed=context.seed,
        output_index=index,
        prompt=context.prompt,
        output=context.output,
        assumed=assumed,
        history=context.history,
        banned=bans_beside(mask, banned, start.stop_ids, vocab),
        mask=mask,
    )


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of a device tensor; the tensor itself where that is all of them."""
    if list(rows) == [*range(values.shape[0])]:
        return values
    return values.index_select(0, ship(torch.tensor(rows, dtype=torch.int64), values.device))


def _pick_head(head: DraftHead, rows: Sequence[int]) -> DraftHead:
    return DraftHead(_pick(head.hidden, rows), _pick(head.base_logits, rows))
