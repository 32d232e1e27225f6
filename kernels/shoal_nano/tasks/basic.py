"""Families copy, sort, arithmetic and reason: short questions with one right answer."""

from __future__ import annotations

import random

from shoal_nano.prompt import Turn
from shoal_nano.tasks.words import FIRST_NAMES, code, word


def copy(rng: random.Random) -> Turn:
    """Repeat words, codes, numbers or letters exactly."""
    kind = rng.randrange(4)
    count = rng.randint(1, 8) if rng.random() < 0.6 else rng.randint(9, 30)
    if kind == 0:
        text = " ".join(word(rng) for _ in range(count))
    elif kind == 1:
        text = " ".join(code(rng) for _ in range(min(count, 12)))
    elif kind == 2:
        text = ", ".join(str(rng.randint(0, 999)) for _ in range(min(count, 16)))
    else:
        text = " ".join(rng.choice((word, code))(rng) for _ in range(count)).capitalize() + rng.choice(".!?")
    ask = rng.choice(
        ("Repeat exactly: {}", "Copy this text: {}", "Say this back to me: {}", "Repeat after me: {}", "Echo: {}",
         "Write the following again, unchanged:\n{}", "Please repeat: {}")
    )  # fmt: skip
    return Turn(user=ask.format(text), answer=text, reasoning="I copy the text.")


def sort(rng: random.Random) -> Turn:
    """Sort numbers or words, up or down."""
    count = rng.randint(2, 8)
    is_down = rng.random() < 0.3
    separator = ", " if rng.random() < 0.85 else " "
    if rng.random() < 0.55:
        top = rng.choice((9, 20, 99, 99, 999))
        count = min(count, top // 2)
        numbers = rng.sample(range(top + 1), count)
        given, answer = [str(n) for n in numbers], [str(n) for n in sorted(numbers, reverse=is_down)]
        what = rng.choice(("numbers", "these numbers", "the numbers"))
        order = rng.choice(("from largest to smallest", "in descending order")) if is_down else rng.choice(
            ("", "", "from smallest to largest", "in ascending order"))  # fmt: skip
    else:
        chosen = sorted({word(rng) for _ in range(count)})
        given, answer = rng.sample(chosen, len(chosen)), sorted(chosen, reverse=is_down)
        what = rng.choice(("words", "these words", "the words"))
        order = rng.choice(("from z to a", "in reverse alphabetical order")) if is_down else rng.choice(
            ("", "alphabetically", "in alphabetical order", "from a to z"))  # fmt: skip
    verb = rng.choice(("Sort", "Sort", "Order", "Please sort"))
    head = " ".join(part for part in (verb, what, order) if part)
    thought = f"{'Largest' if is_down else 'Smallest'} first: {answer[0]}."
    return Turn(user=f"{head}: {separator.join(given)}", answer=separator.join(answer), reasoning=thought)


def arithmetic(rng: random.Random) -> Turn:
    """One sum, difference or product of small whole numbers, or a short word problem with one."""
    kind = rng.random()
    top = rng.choice((10, 20, 100, 100, 1000))
    if kind < 0.45:
        a, b = rng.randint(0, top), rng.randint(0, top)
        sign, result = "+", a + b
    elif kind < 0.8:
        a, b = rng.randint(0, top), rng.randint(0, top)
        a, b = max(a, b), min(a, b)
        sign, result = "-", a - b
    else:
        a, b = rng.randint(0, 12), rng.randint(0, rng.choice((10, 12)))
        sign, result = "*", a * b
    thought = f"{a} {sign} {b} = {result}."
    if rng.random() < 0.2:
        name, thing = rng.choice(FIRST_NAMES), rng.choice(("apples", "books", "coins", "pens", "cards", "stones"))
        story = {
            "+": f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
            "-": f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            "*": f"{name} has {a} boxes with {b} {thing} each. How many {thing} are there?",
        }[sign]
        return Turn(user=story, answer=str(result), reasoning=thought)
    shown_sign = rng.choice(("x", "*", "times")) if sign == "*" else sign
    if sign != "*" and rng.random() < 0.15:
        shown_sign = "plus" if sign == "+" else "minus"
    question = f"{a} {shown_sign} {b}" if rng.random() < 0.85 or len(shown_sign) > 1 else f"{a}{shown_sign}{b}"
    ask = rng.choice(("What is {}?", "What is {}?", "Compute {}.", "Calculate {}", "{} = ?", "How much is {}?", "{}"))
    return Turn(user=ask.format(question), answer=str(result), reasoning=thought)


def reason(rng: random.Random) -> Turn:
    """A question about a short list whose answer takes one step."""
    kind = rng.randrange(5)
    if kind == 0:
        numbers = rng.sample(range(1000), rng.randint(2, 6))
        is_max = rng.random() < 0.5
        answer = str(max(numbers) if is_max else min(numbers))
        name = "largest" if is_max else "smallest"
        ask = f"Which number is the {name}: {', '.join(map(str, numbers))}?"
        return Turn(user=ask, answer=answer, reasoning=f"The {name} of them is {answer}.")
    items = [word(rng) for _ in range(rng.randint(2, 8))]
    shown = ", ".join(items)
    if kind == 1:
        return Turn(
            user=f"How many words are in this list: {shown}?",
            answer=str(len(items)),
            reasoning=" ".join(f"{i} {item}" for i, item in enumerate(items, 1)),
        )
    if kind == 2:
        index = rng.randrange(min(len(items), 5))
        place = ("first", "second", "third", "fourth", "fifth")[index]
        thought = " ".join(f"{i} {item}" for i, item in enumerate(items[: index + 1], 1))
        return Turn(user=f"What is the {place} word of this list: {shown}?", answer=items[index], reasoning=thought)
    if kind == 3:
        return Turn(user=f"What is the last word of this list: {shown}?", answer=items[-1], reasoning=f"It ends with {items[-1]}.")
    return Turn(user=f"Reverse this list: {shown}", answer=", ".join(reversed(items)), reasoning=f"Start with {items[-1]}.")
