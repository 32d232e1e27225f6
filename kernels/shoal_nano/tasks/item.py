"""A task item: a dialogue with its wanted answers, and the check of an answer to its last turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from shoal_nano.prompt import Call, Dialogue, Turn
from shoal_nano.tokenizer import DSML


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question of a family. `content` decides the split and identifies the item."""

    family: str
    dialogue: Dialogue
    content: str

    @property
    def wanted(self) -> Turn:
        return self.dialogue.turns[-1]


Check = Callable[[Item, str], bool]


def same_text(item: Item, answer: str) -> bool:
    """The answer's content equals the wanted one, surrounding space aside."""
    return answer.strip() == item.wanted.answer.strip()


def same_json(item: Item, answer: str) -> bool:
    """The answer parses as JSON and equals the wanted value, types included."""
    try:
        got = json.loads(answer)
    except ValueError:
        return False
    return json.dumps(got, sort_keys=True) == json.dumps(json.loads(item.wanted.answer), sort_keys=True)


def parse_calls(answer: str) -> list[Call] | None:
    """The calls of an answer in DSML syntax, or None if the syntax is broken. No block gives an empty list."""
    if DSML not in answer:
        return []
    block = re.search(rf"\n\n<{DSML} calls>\n(.*)\n</{DSML} calls>\s*\Z", answer, re.DOTALL)
    if block is None:
        return None
    calls = []
    for name, body in re.findall(rf'<{DSML} invoke name="([^"]*)">\n(.*?)</{DSML} invoke>', block[1], re.DOTALL):
        pattern = rf'<{DSML} parameter name="([^"]*)" string="(true|false)">(.*?)</{DSML} parameter>'
        arguments: dict[str, object] = {}
        for key, is_string, value in re.findall(pattern, body, re.DOTALL):
            try:
                arguments[key] = value if is_string == "true" else json.loads(value)
            except ValueError:
                return None
        calls.append(Call(name=name, arguments=arguments))
    return calls


def same_calls(item: Item, answer: str) -> bool:
    """The answer's calls equal the wanted ones; without wanted calls the text must be equal."""
    calls = parse_calls(answer)
    if not item.wanted.calls:
        return calls == [] and same_text(item, answer)
    return calls == list(item.wanted.calls)
