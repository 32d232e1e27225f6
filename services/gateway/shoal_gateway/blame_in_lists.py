"""Which message, item or tool the recipe means where it says only what is wrong between them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

_CALLS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "tool_search_call": "tool_search_output",
}
"""Of Responses' items, those that ask for something, and what answers them."""
_ANSWERS = frozenset(_CALLS.values())
_Messages: TypeAlias = list[dict[str, Any]]
_Find: TypeAlias = Callable[[_Messages, re.Match[str]], int | None]


@dataclass(slots=True)
class _Turn:
    """Of the model, in Responses' items: indices of its last thought, and of the first of what it said and called."""

    thought: int | None = None
    first: int | None = None
    has_text: bool = False
    """Of its thoughts."""
    has_call: bool = False


def objects(value: Any) -> list[dict[str, Any]]:
    """A list's objects, in their places; nothing where it is no list."""
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else []


def _first(is_it: Callable[[_Messages, int], bool]) -> _Find:
    """The index of the first of which that is true."""

    def find(messages: _Messages, found: re.Match[str]) -> int | None:
        return next((index for index in range(len(messages)) if is_it(messages, index)), None)

    return find


def _is_unanswered(messages: _Messages, index: int) -> bool:
    """A turn with calls to which not all answers follow."""
    wanted = {call.get("id") for call in objects(messages[index].get("tool_calls"))}
    for later in range(index + 1, len(messages) if wanted else 0):
        message = messages[later]
        if message.get("role") != "tool" or not wanted:
            break
        wanted.discard(message.get("tool_call_id"))
    return bool(wanted)


def _is_unasked(messages: _Messages, index: int) -> bool:
    """A tool's answer without a turn that called it."""
    before = messages[index - 1] if index else {}
    return messages[index].get("role") == "tool" and before.get("role") != "tool" and not before.get("tool_calls")


def _thoughtless(messages: _Messages, found: re.Match[str]) -> int | None:
    """A turn with calls that came without its thought. Before the last user's turn none is missed."""
    asked = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    turns = range(asked + 1, len(messages))
    return next(
        (at for at in turns if messages[at].get("tool_calls") and not messages[at].get("reasoning_content")), None
    )


def _thoughtless_blocks(messages: _Messages, found: re.Match[str]) -> int | None:
    """As that, of Anthropic's blocks: the last such turn, because thoughts are missed behind the last question only."""
    kinds = [{block.get("type") for block in objects(message.get("content"))} for message in messages]
    turns = [index for index, some in enumerate(kinds) if "tool_use" in some and "thinking" not in some]
    return turns[-1] if turns else None


def _thoughtless_items(items: _Messages, found: re.Match[str]) -> int | None:
    """As that, of Responses' items: the thought that came without its text, or else what came without a thought."""
    asked = max((index for index, item in enumerate(items) if item.get("role") == "user"), default=-1)
    turns = [turn for turn in _turns(items, asked + 1) if turn.first is not None and not turn.has_text]
    # Where there are no tools, only turns with calls need a thought.
    turn = next((turn for turn in turns if turn.has_call), turns[0] if turns else None)
    return None if turn is None else turn.first if turn.thought is None else turn.thought


def _turns(items: _Messages, begin: int) -> Iterator[_Turn]:
    turn = _Turn()
    for index in range(begin, len(items)):
        item = items[index]
        kind, role = item.get("type"), item.get("role")
        has_text = kind == "reasoning" and any(part.get("text") for part in objects(item.get("content")))
        if (has_text and turn.first is not None) or kind in _ANSWERS or role not in (None, "assistant"):
            yield turn
            turn = _Turn()
        if kind == "reasoning":
            turn.thought, turn.has_text = index, turn.has_text or has_text
        elif role == "assistant" or kind in _CALLS:
            turn.first = index if turn.first is None else turn.first
            turn.has_call = turn.has_call or kind in _CALLS
    yield turn


def _is_misplaced(messages: _Messages, index: int) -> bool:
    """A turn that is to be continued, and cannot be."""
    place = (index, messages[index].get("role"))
    return bool(messages[index].get("prefix")) and place != (len(messages) - 1, "assistant")


def _is_silent(messages: _Messages, index: int) -> bool:
    """A turn that says nothing."""
    message = messages[index]
    return message.get("role") == "assistant" and message.get("content") is None and not message.get("tool_calls")


def _is_continued(messages: _Messages, index: int) -> bool:
    """The turn that is to be continued."""
    return bool(messages[index].get("prefix"))


def _repeated(tools: _Messages, found: re.Match[str]) -> int | None:
    """A tool whose name one before it has."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = str((tool.get("function") or tool).get("name"))
        if name in seen:
            return index
        seen.add(name)
    return None


def _of_call(kinds: Iterable[str]) -> _Find:
    """The item of one of these types that has the id in the message."""
    wanted = frozenset(kinds)

    def find(items: _Messages, found: re.Match[str]) -> int | None:
        def is_it(index: int) -> bool:
            return items[index].get("type") in wanted and items[index].get("call_id") == found[1]

        return next((index for index in range(len(items)) if is_it(index)), None)

    return find


OF_LISTS: tuple[tuple[re.Pattern[str], str, _Find, str], ...] = (
    (re.compile("must be followed by tool messages"), "messages", _first(_is_unanswered), ".tool_calls"),
    (re.compile("must be a response to a preceding message"), "messages", _first(_is_unasked), ".tool_call_id"),
    (re.compile("`reasoning_content` in the thinking"), "messages", _thoughtless, ".reasoning_content"),
    (re.compile(r"`content\[\]\.thinking` in the thinking"), "messages", _thoughtless_blocks, ".content"),
    (re.compile("`reasoning_text` in the thinking"), "input", _thoughtless_items, ""),
    (re.compile("prefix set true with message"), "messages", _first(_is_misplaced), ".prefix"),
    (re.compile("call should not be used with prefix"), "messages", _first(_is_continued), ".prefix"),
    (re.compile("content or tool_calls must be set"), "messages", _first(_is_silent), ".content"),
    (re.compile("Tool names must be unique"), "tools", _repeated, ""),
    (re.compile(r"No tool output found for tool call (.*)\.$"), "input", _of_call(_CALLS), ".call_id"),
    (re.compile(r"for tool output with call_id (.*)\.$"), "input", _of_call(_ANSWERS), ".call_id"),
)
"""What a message is about, the list that has it, where in it, and what of that."""
