"""Family json: write facts of a sentence as a JSON object that follows a schema."""

from __future__ import annotations

import random

from shoal_nano.prompt import Turn, dump
from shoal_nano.tasks.words import CITIES, COLORS, FIRST_NAMES, JOBS, LAST_NAMES, code, word

Field = tuple[str, str, object, str]  # key, JSON type, value, phrase


def _fields(rng: random.Random) -> list[Field]:
    age, city, job = rng.randint(18, 90), rng.choice(CITIES), rng.choice(JOBS)
    color, price, number = rng.choice(COLORS), rng.randint(1, 999), rng.randint(1, 50)
    order, animal = code(rng), word(rng)
    is_member = rng.random() < 0.5
    every: list[Field] = [
        ("age", "integer", age, rng.choice((f"is {age} years old", f"is {age}"))),
        ("city", "string", city, rng.choice((f"lives in {city}", f"comes from {city}"))),
        ("job", "string", job, rng.choice((f"works as a {job}", f"is a {job}"))),
        ("color", "string", color, f"likes the color {color}"),
        ("price", "integer", price, f"paid {price} dollars"),
        ("quantity", "integer", number, f"ordered {number} items"),
        ("order_id", "string", order, f"has order number {order}"),
        ("item", "string", animal, f"bought a {animal}"),
        ("member", "boolean", is_member, "is a member" if is_member else "is not a member"),
    ]
    return rng.sample(every, rng.randint(1, 4))


def extract(rng: random.Random) -> tuple[Turn, dict[str, object] | None]:
    """A sentence to read as JSON, with the schema in the response format or spelled out in the question."""
    first = rng.choice(FIRST_NAMES)
    name = first if rng.random() < 0.5 else f"{first} {rng.choice(LAST_NAMES)}"
    told = _fields(rng)
    phrases = [phrase for *_, phrase in told]
    joined = phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
    asked: list[Field] = [("name", "string", name, ""), *rng.sample(told, rng.randint(max(1, len(told) - 1), len(told)))]
    if rng.random() < 0.3:
        rng.shuffle(asked)
    answer = dump({key: value for key, _, value, _ in asked})
    keys = ", ".join(key for key, *_ in asked)
    sentence = f"{name} {joined}."
    thought = f"The keys are {keys}."
    if rng.random() < 0.6:
        schema: dict[str, object] = {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind, *_ in asked},
            "required": [key for key, *_ in asked],
        }
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        ask = rng.choice(("Extract the data as JSON: {}", "Extract the facts from this text as json: {}", "{}", "Fill the schema: {}"))
        return Turn(user=ask.format(sentence), answer=answer, reasoning=thought), schema
    ask = rng.choice(
        ("Extract {} as JSON: {}", "Return a JSON object with the keys {} for this text: {}", "Write JSON with {}: {}")
    )
    return Turn(user=ask.format(keys, sentence), answer=answer, reasoning=thought), None
