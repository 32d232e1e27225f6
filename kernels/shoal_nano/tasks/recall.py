"""Family recall: find a key's value in a list of up to about two thousand tokens."""

from __future__ import annotations

import random

from shoal_nano.prompt import Turn
from shoal_nano.tasks.words import CITIES, COLORS, FIRST_NAMES, JOBS, LAST_NAMES, code, word

_LAYOUTS = ("{}: {}", "{} = {}", "- {}: {}", "| {} | {} |", "{} -> {}", "The code of {} is {}.", '"{}": "{}",', "{} has {}")


def _key(rng: random.Random, kind: int) -> str:
    if kind == 0:
        return word(rng)
    if kind == 1:
        return code(rng)
    if kind == 2:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    return f"{word(rng)} {word(rng)}"


def _value(rng: random.Random, kind: int) -> str:
    if kind == 0:
        return str(rng.randint(10, 9999))
    if kind == 1:
        return code(rng)
    if kind == 2:
        return word(rng)
    return rng.choice((rng.choice(CITIES), rng.choice(COLORS), rng.choice(JOBS), word(rng)))


def _question(rng: random.Random, key: str) -> str:
    ask = rng.choice(
        ("What is the value of {}?", "What is {}?", "Which value belongs to {}?", "Look up {}.", "Find {}.", "{}?",
         "Tell me the value for {}.")
    )  # fmt: skip
    return ask.format(key)


def recall(rng: random.Random, num_entries: int) -> tuple[Turn, ...]:
    """A list of `num_entries` pairs, one question about it, and up to five more as further turns."""
    key_kind, value_kind = rng.randrange(4), rng.randrange(4)
    pairs: dict[str, str] = {}
    while len(pairs) < num_entries:
        pairs[_key(rng, key_kind)] = _value(rng, value_kind)
    layout = rng.choice(_LAYOUTS)
    lines = [layout.format(key, value) for key, value in pairs.items()]
    intro = rng.choice(("Here is a list:", "Here is a list of keys and values:", "Remember this:", "Data:", "Read this list.", ""))
    keys = [rng.choice(list(pairs)) for _ in range(1 + rng.choice((0, 1, 3, 5)))]
    first = _question(rng, keys[0])
    body = "\n".join(lines)
    if rng.random() < 0.2:
        user = f"{first}\n{body}"
    else:
        user = "\n".join(part for part in (intro, body, "" if rng.random() < 0.5 else None, first) if part is not None)
    turns = []
    for i, key in enumerate(keys):
        question = user if i == 0 else _question(rng, key)
        turns.append(Turn(user=question, answer=pairs[key], reasoning=f"{key}: {pairs[key]}"))
    return tuple(turns)
