"""Generators and checkers of the task families."""

from __future__ import annotations

import random

import pytest
from shoal_nano.prompt import answer_text
from shoal_nano.tasks import CHECKED_FAMILIES, check, held_out_items, make_item


@pytest.mark.parametrize("family", CHECKED_FAMILIES)
def test_the_wanted_answer_passes_and_a_changed_one_fails(family: str) -> None:
    for item in held_out_items(family, 20, 3):
        wanted = answer_text(item.wanted)
        assert check(item, wanted)
        assert not check(item, wanted[:-2])
        assert not check(item, "x" + wanted if not item.wanted.calls else "")


@pytest.mark.parametrize("family", CHECKED_FAMILIES)
def test_no_training_item_has_a_held_out_question(family: str) -> None:
    rng = random.Random(4)
    training = {make_item(family, rng, held_out=False).dialogue.turns[0].user for _ in range(200)}
    assert training.isdisjoint(item.dialogue.turns[0].user for item in held_out_items(family, 40, 5))


def test_held_out_items_repeat_by_seed() -> None:
    assert held_out_items("json", 5, 1) == held_out_items("json", 5, 1)
    assert held_out_items("json", 5, 1) != held_out_items("json", 5, 2)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(KeyError):
        make_item("poetry", random.Random(0), held_out=False)
