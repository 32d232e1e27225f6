"""The families by name, and the choice of prompt form around them."""

from __future__ import annotations

import random

from shoal_nano.prompt import Dialogue, Turn
from shoal_nano.tasks import basic
from shoal_nano.tasks.chat import SYSTEMS, chat
from shoal_nano.tasks.extract import extract
from shoal_nano.tasks.item import Check, Item, same_calls, same_json, same_text
from shoal_nano.tasks.recall import recall
from shoal_nano.tasks.tools import tool
from shoal_nano.tasks.words import is_held_out

_CHECKS: dict[str, Check] = {
    "copy": same_text,
    "sort": same_text,
    "arithmetic": same_text,
    "reason": same_text,
    "recall": same_text,
    "json": same_json,
    "tool": same_calls,
    "chat": same_text,
}
FAMILIES = tuple(_CHECKS)
CHECKED_FAMILIES = tuple(name for name in FAMILIES if name != "chat")
_BASIC = {"copy": basic.copy, "sort": basic.sort, "arithmetic": basic.arithmetic, "reason": basic.reason, "chat": chat}
MAX_RECALL_ENTRIES = 170


def _recall_entries(rng: random.Random) -> int:
    """List lengths from a few lines to all that 2,000 tokens hold, each scale equally likely."""
    return int(round(3 * (MAX_RECALL_ENTRIES / 3) ** rng.random()))


def _dialogue(family: str, rng: random.Random, is_evaluation: bool) -> Dialogue:
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, object], ...] = ()
    schema = None
    if family == "recall":
        turns = recall(rng, _recall_entries(rng))
        if is_evaluation:
            turns = turns[:1]
    elif family == "json":
        turn, schema = extract(rng)
        turns = (turn,)
    elif family == "tool":
        turns, tools = tool(rng)
        if is_evaluation:
            turns = turns[:1]
    else:
        turns = (_BASIC[family](rng),)
        if not is_evaluation:
            while rng.random() < 0.3 and len(turns) < 4:
                turns = (*turns, _BASIC[rng.choice(sorted(_BASIC))](rng))
    is_thinking = rng.random() < 0.5
    effort = rng.choice((75, 75, 75, 50, 100, rng.randint(1, 100)))
    system = rng.choice(SYSTEMS) if rng.random() < 0.3 else ""
    return Dialogue(turns=turns, system=system, is_thinking=is_thinking, effort=effort, tools=tools, schema=schema)


def make_item(family: str, rng: random.Random, *, held_out: bool) -> Item:
    """Draw items of a family until one belongs to the wanted split.

    Held-out items have one turn, so that the whole answer is checked. The content that decides the split is every question
    and answer of the dialogue: a question seen in training is never held out. Raises KeyError for an unknown family.
    """
    if family not in _CHECKS:
        raise KeyError(family)
    while True:
        dialogue = _dialogue(family, rng, held_out)
        contents = [f"{turn.user}\0{turn.answer}" for turn in dialogue.turns]
        if family == "chat" or all(is_held_out(content) == held_out for content in contents):
            return Item(family=family, dialogue=dialogue, content="\0".join(contents))


def held_out_items(family: str, count: int, seed: int) -> list[Item]:
    """`count` held-out items of a family; the same seed gives the same items."""
    rng = random.Random(f"held-out {family} {seed}")
    return [make_item(family, rng, held_out=True) for _ in range(count)]


def check(item: Item, answer: str) -> bool:
    """Whether `answer` (content after the reasoning, calls included, without EOS) is right."""
    return _CHECKS[item.family](item, answer)
