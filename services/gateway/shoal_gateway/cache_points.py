"""From messages after which a snapshot is kept to positions in the prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepseek_recipe import Conversation
from shoal_common.errors import InvalidArgument


def cache_points(
    conversation: Conversation,
    prompt_ids: Sequence[int],
    message_indices: Sequence[int],
    encode: Callable[[Conversation], list[int]],
    field: str,
) -> tuple[int, ...]:
    """Token counts, ascending: for each message what the prompt shares with one that ends behind that message.

    A later conversation that has these messages begins with these tokens. Raises InvalidArgument for a message that
    does not exist.
    """
    count = len(conversation.messages)
    points = set()
    for place, index in enumerate(message_indices):
        if index >= count:
            raise InvalidArgument.at(f"{field}[{place}]", f"must be a message's index, below {count}, got {index}")
        points.add(_shared(prompt_ids, encode(_first(conversation, index + 1))))
    return tuple(sorted(points - {0}))


def _first(whole: Conversation, count: int) -> Conversation:
    """Its first messages, everything else the same."""
    is_json = whole.response_format == "json_object"
    return Conversation(
        whole.messages[:count],
        thinking_mode=whole.thinking_mode,
        tools=whole.tools,
        tool_choice=whole.tool_choice,
        reasoning_effort=whole.reasoning_effort,
        response_format="json_object" if is_json else "text",
        response_schema=whole.response_schema,
        response_regex=whole.response_regex,
    )


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
