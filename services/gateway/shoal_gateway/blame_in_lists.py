"""Which message, item or tool the recipe means where it says only what is wrong between them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

_CALLS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "tool_search_call": "tool_search_output",
}
"""Of Responses' items, those that ask for something, and what answers them."""
_Messages: TypeAlias = list[dict[str, Any]]
_Find: TypeAlias = Callable[[_Messages, re.Match[str]], int | None]


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
    """As that, of Responses' items: the thought that came without its text, or else the call that came without one."""
    asked = max((index for index, item in enumerate(items) if item.get("role") == "user"), default=-1)
    thought = call = None
    has_text = False
    for index in range(asked + 1, len(items)):
        item = items[index]
        kind = item.get("type")
        if kind == "reasoning":
            has_text = has_text or any(part.get("text") for part in objects(item.get("content")))
            thought = index
        elif kind in _CALLS:
            call = index if call is None else call
        elif kind in _CALLS.values() or item.get("role") not in (None, "assistant"):
            # Here a turn of the model ends.
            if call is not None and not has_text:
                break
            thought, call, has_text = None, None, False
    if call is None or has_text:
        return None
    return call if thought is None else thought


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
    (re.compile(r"for tool output with call_id (.*)\.$"), "input", _of_call(_CALLS.values()), ".call_id"),
)
"""What a message is about, the list that has it, where in it, and what of that."""
