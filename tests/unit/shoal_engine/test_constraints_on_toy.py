"""One request whose constraint fails in a step, or does not fit its tokens so far, costs nobody else anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from shoal_common.errors import InvalidArgument
from shoal_engine.admission import Growth
from shoal_engine.constraint import Mask
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart
from support.engine_driver import Driver, request
from support.toy_model import EOS, REPLAY, VOCAB, ToyModel, toy_output

ODD = [token for token in range(VOCAB) if token % 2]


@dataclass
class OddMatcher:
    """Allows odd tokens, `length` of them at most; fails at output index `fails_at`."""

    length: int
    fails_at: int | None
    tokens: list[int] = field(default_factory=list)

    def fill(self, mask: Mask) -> bool:
        if len(self.tokens) == self.fails_at:
            raise InvalidArgument("too much", reason="CONSTRAINT_FAILED")
        ids = [EOS] if len(self.tokens) >= self.length else [token for token in ODD if token != EOS]
        bits = mask.view(np.uint32)
        bits[:] = 0
        for token in ids:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token_id: int) -> bool:
        is_over = bool(self.tokens) and self.tokens[-1] == EOS
        is_allowed = token_id == EOS if len(self.tokens) >= self.length else token_id in ODD and token_id != EOS
        if is_allowed and not is_over:
            self.tokens.append(token_id)
        return is_allowed and not is_over

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


@dataclass(frozen=True)
class Odd:
    """A constraint of such matchers."""

    length: int = 30
    fails_at: int | None = None

    def matcher(self, *, avoids_end: bool = False) -> OddMatcher:
        return OddMatcher(self.length, self.fails_at)


@pytest.mark.parametrize("width", [0, 3, 5])
@pytest.mark.parametrize("place", [0, 1, 7, 12])
def test_a_constraint_that_fails_in_a_step_ends_its_request_alone(width: int, place: int) -> None:
    d = Driver(ToyModel(), replay_length=REPLAY, planner=FixedWidth(width))
    prompt = list(range(10, 40))
    d.submit(
        request(prompt, name="fails", seed=3, max_tokens=20, constraint=Odd(fails_at=place)),
        request(prompt, name="goes on", seed=4, max_tokens=20, ignore_eos=True),
    )
    d.run()
    error, indices = d.sink.failed["fails"]
    # Where it fails does not depend on how far drafts had run ahead.
    assert (error.reason, indices) == ("CONSTRAINT_FAILED", (place,))
    assert len(d.sink.tokens["fails", 0]) == place
    assert d.sink.tokens["goes on", 0] == toy_output(prompt, 4, 20, frozenset())
    d.assert_at_baseline()


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 18}])
def test_a_complete_answer_ends_whatever_else_was_asked_for(width: int, more: dict[str, Any]) -> None:
    d = Driver(ToyModel(draft_quality=100), replay_length=REPLAY, planner=FixedWidth(width))
    [tokens] = d.generate(request(range(10, 40), seed=5, max_tokens=20, constraint=Odd(length=9), **more))
    assert len(tokens) == 10
    assert tokens[-1] == EOS
    assert all(token in ODD for token in tokens)
    ends, _ = d.sink.ended["r"]
    assert ends[0].finish_reason is not None
    assert ends[0].finish_reason.value == "stop"
    d.assert_at_baseline()


def test_tokens_so_far_that_do_not_fit_are_refused_at_admission() -> None:
    d = Driver(ToyModel(), replay_length=REPLAY)
    with pytest.raises(InvalidArgument) as caught:
        d.admit(request(range(10, 40), max_tokens=9, constraint=Odd(), choices=[ChoiceStart(output_ids=(5, 7, 8))]))
    assert caught.value.violations[0].field == "choices[0].output_ids[2]"
    d.assert_at_baseline()


def test_a_request_that_lost_its_blocks_goes_on_in_its_constraint() -> None:
    wanted = Driver(ToyModel(), replay_length=REPLAY).generate(
        request(range(10, 40), seed=6, max_tokens=400, constraint=Odd(length=390))
    )
    d = Driver(ToyModel(block_count=6), replay_length=REPLAY, growth=Growth(admitted_output=16, blocks=1))
    more: dict[str, Any] = {"recover_in_place": True}
    d.submit(
        request(range(10, 40), name="first", seed=1, max_tokens=500, ignore_eos=True, arrival=0.0, **more),
        request(range(10, 40), name="second", seed=6, max_tokens=400, constraint=Odd(length=390), arrival=1.0, **more),
    )
    d.run(until=lambda: d.core.stats().waiting > 0)
    assert d.core.stats().waiting == 1, "it lost its blocks on the way"
    d.run()
    assert not d.sink.failed
    assert [d.sink.tokens["second", 0]] == wanted
    d.assert_at_baseline()
