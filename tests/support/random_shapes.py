"""Random requests in random deployment shapes: what an engine is put through, and what must come out all the same.

Everything is drawn from one seed: prompts around every boundary, parameters, where each prompt comes from, where its
answer had been interrupted, slots that others used before, row budgets, verify widths, room for blocks, pauses, and
newer attempts of a request that runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from shoal_common.errors import MeshError, OutOfCapacity
from shoal_engine.admission import Growth
from shoal_engine.errors import ExceedsCapacity
from shoal_engine.events import FinishReason, PositionLogprobs
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows, RowKind
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart, GenerationRequest, PrefillRequest
from shoal_engine.served_model import ServedModel
from shoal_model.checkpoint import Checkpoint
from shoal_model.load_weights import load_weights
from shoal_model.model import Model
from shoal_model.sampler import choice_seed
from support.engine_driver import Driver, RandomWidths, planned, request
from support.exactness import GuidedModel

MAX_STEPS = 50_000


@dataclass(frozen=True)
class Answer:
    """What one choice says alone: one prompt, one chunk, no drafts, nothing cached."""

    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    reason: FinishReason | None


@dataclass(frozen=True)
class Stored:
    """What a cold prefill of a token sequence leaves: blocks and snapshots by position, and a hand-over."""

    blocks: dict[int, bytes]
    snapshots: dict[int, bytes]
    rows: list[LogicalRows]
    hidden_row: bytes


class World:
    """A checkpoint, and the answers and caches of its requests when they are alone."""

    def __init__(self, directory: Path, replay_length: int, lengths: Sequence[int], outputs: Sequence[int]) -> None:
        checkpoint = Checkpoint.open(directory)
        self.config, self._weights = checkpoint.config, load_weights(checkpoint)
        self.replay_length, self.lengths, self.outputs = replay_length, lengths, outputs
        self._alone = ServedModel(self.model(64, 1))
        self.stored = cache(self._stored)

    def model(self, blocks: int, slots: int) -> Model:
        return Model(self.config, self._weights, num_blocks=blocks + 1, num_slots=slots)

    def answer(self, asked: GenerationRequest, choice: int) -> Answer:
        d = Driver(self._alone, replay_length=self.replay_length, planner=FixedWidth(0), chunk=4096, rows=8192)
        d.generate(replace(asked, seed=choice_seed(asked.seed, choice), choices=(ChoiceStart(),)))
        logprobs = tuple(one for entry in d.sink.entries for one in entry.logprobs)
        name = asked.request_id
        return Answer(tuple(d.sink.tokens[name, 0]), logprobs, d.sink.ended[name][0][0].finish_reason)

    def _stored(self, tokens: tuple[int, ...]) -> Stored:
        d = Driver(self._alone, replay_length=self.replay_length, planner=FixedWidth(0), chunk=4096, rows=8192)
        points = tuple(range(128, len(tokens) + 1, 128))
        prompt = PrefillRequest(request_id="p", prompt_ids=np.array(tokens), export_chain=True, cache_points=points)
        d.submit(prompt)
        d.run()
        blocks = {index: data for (_, _, index), data in d.sink.blocks.items()}
        snapshots = {position: data for (_, _, position), data in d.sink.snapshots.items()}
        return Stored(blocks, snapshots, d.sink.rows["p"], d.sink.prefilled["p"][0])


class Shape:
    """One engine and its requests, both random. `run` fails where an answer or a stored byte differs."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, random.Random(seed)
        self._requests = [self._request(f"q{i}") for i in range(self._random.randint(1, 4))]
        self._answers = {
            (asked.request_id, choice): world.answer(asked, choice)
            for asked in self._requests
            for choice in range(len(asked.choices))
        }
        self._started: dict[str, GenerationRequest] = {}
        self._resumed: set[str] = set()
        self._driver = self._engine(seed)

    def run(self) -> None:
        d, waiting = self._driver, list(self._requests)
        self._use_slots()
        for _ in range(MAX_STEPS):
            if waiting and self._chance(0.5) and self._begin(waiting[0]):
                waiting.pop(0)
            self._disturb()
            if not d.core.step() and not waiting:
                self._resume_all()
                if not d.core.step():
                    break
        for asked in self._requests:
            for choice in range(len(asked.choices)):
                self._check(asked, choice)
        assert not [name for name in d.sink.failed if name in self._started and name not in self._resumed]
        d.assert_at_baseline()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _prompt(self, length: int) -> list[int]:
        """One of few beginnings, so that requests share prefixes, and an end of its own."""
        shared, own = random.Random(self._random.randrange(3)), self._random.choice((0, length // 2))
        high = self._world.config.vocab_size - 10
        prompt = [shared.randrange(3, high) for _ in range(length)]
        return prompt[: length - own] + [self._random.randrange(3, high) for _ in range(own)]

    def _request(self, name: str) -> GenerationRequest:
        draw, vocab = self._random, self._world.config.vocab_size
        options: dict[str, list[Any]] = {
            "temperature": [0.0, 0.7, 1.0, 1e-5, 0.99e-5],
            "top_p": [1.0, 1.0, 0.9, 0.3],
            "top_k": [0, 0, 2, 50],
            "min_p": [0.0, 0.0, 0.1],
            "presence_penalty": [0.0, 0.0, 1.0],
            "frequency_penalty": [0.0, 0.0, 0.3],
            "repetition_penalty": [1.0, 1.0, 1.3],
            "logit_bias": [{}, {}, {5: 3.0, 7: -100.0}],
            "stop_token_ids": [frozenset(), frozenset(draw.randrange(vocab) for _ in range(vocab // 20))],
            "top_logprobs": [None, None, 0, 3],
            "ignore_eos": [True, False],
        }
        chosen = {field: draw.choice(values) for field, values in options.items()}
        length = max(1, draw.choice(self._world.lengths) + draw.choice((0, 0, -1, 1)))
        output = draw.choice(self._world.outputs)
        return request(
            self._prompt(length),
            name=name,
            seed=draw.choice((0, 2**64 - 1, draw.getrandbits(64))),
            choices=(ChoiceStart(),) * draw.choice((1, 1, 2, 3)),
            max_tokens=output,
            min_tokens=draw.choice((0, 0, output // 2)),
            priority=draw.choice((0, 0, 1)),
            arrival=draw.random(),
            recover_in_place=True,
            **chosen,
        )

    def _engine(self, seed: int) -> Driver:
        draw, asked = self._random, self._requests
        needs = [-(-(len(a.prompt_ids) + (a.params.max_tokens or 0)) // 128) * len(a.choices) for a in asked]
        is_short = self._chance(0.4)
        blocks = max(needs) + draw.randint(0, 2) if is_short else sum(needs) + 20
        answers: dict[tuple[int, int], Sequence[int]] = {
            (len(a.prompt_ids), choice_seed(a.seed, choice)): self._answers[a.request_id, choice].tokens
            for a in asked
            for choice in range(len(a.choices))
        }
        self._slots = sum(len(a.choices) for a in asked) + 1
        model = self._world.model(blocks, self._slots)
        chunk = draw.choice((7, 33, 128, 129, 512))
        return Driver(
            GuidedModel(model, answers, seed) if self._chance(0.7) else ServedModel(model),
            replay_length=self._world.replay_length,
            planner=draw.choice((FixedWidth(0), FixedWidth(2), FixedWidth(5), RandomWidths(seed), planned())),
            chunk=chunk,
            rows=draw.choice((chunk, chunk + 5, 8192)),
            growth=Growth(admitted_output=draw.choice((1, 4)), blocks=1) if is_short else Growth(),
        )

    def _use_slots(self) -> None:
        """Requests that are gone before any of ours comes: nothing of theirs may be seen."""
        d, names = self._driver, [f"before{i}" for i in range(self._random.randint(0, self._slots))]
        for name in names:
            prompt = self._prompt(self._random.choice(self._world.lengths[:-3]))
            try:
                d.submit(PrefillRequest(request_id=name, prompt_ids=np.array(prompt)))
            except (OutOfCapacity, ExceedsCapacity):
                break
        for _ in range(self._random.randint(1, 5)):
            d.core.step()
        for name in names:
            d.core.cancel(name)

    def _begin(self, asked: GenerationRequest) -> bool:
        draw, d, name, length = self._random, self._driver, asked.request_id, len(asked.prompt_ids)
        points = tuple(sorted({draw.randint(1, length) for _ in range(draw.choice((0, 2)))}))
        asked = replace(asked, export_chain=self._chance(0.7), cache_points=points)
        if self._chance(0.5):
            asked = replace(asked, choices=tuple(self._interrupted(name, i) for i in range(len(asked.choices))))
        try:
            d.admit(asked)
        except OutOfCapacity:
            return False
        self._started[name] = asked
        stored = self._world.stored(tuple(asked.prompt_ids.tolist()))
        origin = draw.choice(("cold", "hit", "hit", "remote", "remote, broken off"))
        hit = 128 * draw.randint(0, max(0, length - self._world.replay_length) // 128)
        if origin != "cold" and hit:
            window = stored.snapshots[hit] if self._chance(0.5) else None
            blocks = [stored.blocks[i] for i in range(hit // 128)]
            branch = draw.choice((0, length // 128 * 128))
            d.core.load_prefix(
                name, PrefixRows(hit_tokens=hit, blocks=blocks, encoder_window=window, branch_tokens=branch)
            )
        if origin == "remote":
            drafts = self._chance(0.5)
            rows = [one for one in stored.rows if drafts or one.kind is not RowKind.DRAFT_WINDOW]
            d.core.load_prompt(name, HandoverRows(rows=rows, hidden_row=stored.hidden_row))
            return True
        if origin == "remote, broken off":
            d.core.load_rows(name, stored.rows[: draw.randint(0, len(stored.rows))])
        d.core.start(name)
        return True

    def _interrupted(self, name: str, choice: int) -> ChoiceStart:
        answer = self._answers[name, choice].tokens
        cut = len(answer) if self._chance(0.2) else self._random.randint(0, len(answer))
        return ChoiceStart(output_ids=answer[:cut], is_finished=cut == len(answer) and self._chance(0.5))

    def _disturb(self) -> None:
        """Pause a choice, or send a newer attempt of a request that runs."""
        running = [name for name in self._started if name in self._driver.core._roster.states]
        if not running:
            return
        name = self._random.choice(running)
        choice = self._random.randrange(len(self._started[name].choices))
        if self._chance(0.1):
            self._driver.core.pause(name, choice)
        elif self._chance(0.2):
            self._driver.core.resume(name, choice)
        elif self._chance(0.03):
            self._resume_elsewhere(name)

    def _resume_elsewhere(self, name: str) -> None:
        d, older = self._driver, self._started[name]
        state = d.core._roster.states[name]
        choices = tuple(ChoiceStart(output_ids=tuple(s.output), is_finished=s.is_done) for s in state.sequences)
        newer = replace(older, attempt=older.attempt + 1, choices=choices)
        for kept in (d.sink.blocks, d.sink.snapshots):
            for key in [key for key in kept if key[0] == name]:
                del kept[key]
        self._resumed.add(name)
        self._started[name] = newer
        while True:
            try:
                d.admit(newer)
            except OutOfCapacity:
                # The older attempt has left; the others make room.
                self._resume_all()
                assert d.core.step()
            else:
                break
        d.core.start(name)

    def _resume_all(self) -> None:
        for name, asked in self._started.items():
            for choice in range(len(asked.choices)):
                try:
                    self._driver.core.resume(name, choice)
                except MeshError:
                    break

    def _check(self, asked: GenerationRequest, choice: int) -> None:
        sink, name, answer = self._driver.sink, asked.request_id, self._answers[asked.request_id, choice]
        assert tuple(sink.tokens[name, choice]) == answer.tokens
        end, begun = sink.ended[name][0][choice], self._started[name].choices[choice]
        assert end.token_count == len(answer.tokens)
        if not begun.is_finished:
            assert end.finish_reason is answer.reason
            if asked.params.top_logprobs is not None and name not in self._resumed:
                mine = [entry for entry in sink.entries if (entry.request_id, entry.choice) == (name, choice)]
                found = tuple(one for entry in mine for one in entry.logprobs)
                assert found == answer.logprobs[len(begun.output_ids) :]
        stored = self._world.stored((*asked.prompt_ids.tolist(), *answer.tokens))
        for (owner, of, index), data in sink.blocks.items():
            assert owner != name or of not in (None, choice) or data == stored.blocks[index]
        for (owner, of, position), data in sink.snapshots.items():
            assert owner != name or of not in (None, choice) or data == stored.snapshots[position]
