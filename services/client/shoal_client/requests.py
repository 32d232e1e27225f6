"""From Python values to the messages of the interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.common.v1.sampling_pb2 import DETERMINISM_EXACT, Constraint, SamplingParams
from shoal.common.v1.tokens_pb2 import TokenIds
from shoal.inference.v1.chat_pb2 import ChatMessage, ChatPrompt, ChatRole, Tool
from shoal.inference.v1.generation_pb2 import Generation, OutputForm

_ROLES = {
    "system": ChatRole.CHAT_ROLE_SYSTEM,
    "user": ChatRole.CHAT_ROLE_USER,
    "assistant": ChatRole.CHAT_ROLE_ASSISTANT,
    "tool": ChatRole.CHAT_ROLE_TOOL,
}


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of plain text that is continued, not answered."""

    text: str


Prompt = str | Text | Sequence[int] | Sequence[Mapping[str, str]] | ChatPrompt
"""A user's message, plain text, token ids, messages as `{"role": ..., "content": ...}`, or the full message."""


def generation(
    prompt: Prompt,
    *,
    model: str = "",
    sampling: SamplingParams | None = None,
    n: int | None = None,
    stop: Sequence[str] = (),
    tools: Sequence[Tool] = (),
    reasoning_effort: int | None = None,
    output_form: OutputForm.ValueType = OutputForm.OUTPUT_FORM_UNSPECIFIED,
    user_id: str | None = None,
    is_exact: bool = False,
    constraint: Constraint | None = None,
) -> Generation:
    """The request's message. Raises ValueError for a prompt of no known shape; limits are the server's to check.

    is_exact     fail rather than give an answer that could not be repeated bit for bit
    constraint   what the answer's text must be
    """
    made = Generation(model=model, sampling=sampling, n=n, stop=stop, output_form=output_form, user_id=user_id)
    if is_exact:
        made.determinism = DETERMINISM_EXACT
    if constraint is not None:
        made.constraint.CopyFrom(constraint)
    if isinstance(prompt, Text):
        made.text = prompt.text
    elif isinstance(prompt, ChatPrompt):
        made.chat.CopyFrom(prompt)
    elif isinstance(prompt, str):
        made.chat.messages.append(_message({"role": "user", "content": prompt}))
    elif all(isinstance(one, int) for one in prompt):
        made.tokens.CopyFrom(TokenIds(ids=prompt))  # type: ignore[arg-type]
    elif all(isinstance(one, Mapping) for one in prompt):
        made.chat.messages.extend(_message(one) for one in prompt)  # type: ignore[arg-type]
    else:
        raise ValueError("a prompt is text, token ids, or messages, not a mixture")
    if tools or reasoning_effort is not None:
        if not made.HasField("chat"):
            raise ValueError("tools and reasoning_effort need a conversation")
        made.chat.tools.extend(tools)
        if reasoning_effort is not None:
            made.chat.reasoning_effort = reasoning_effort
    return made


def _message(values: Mapping[str, str]) -> ChatMessage:
    role = values.get("role", "")
    if role not in _ROLES:
        raise ValueError(f"a message's role is one of {', '.join(_ROLES)}, got {role!r}")
    unknown = set(values) - {"role", "content", "reasoning_content", "tool_call_id"}
    if unknown:
        raise ValueError(f"unknown fields of a message: {', '.join(sorted(unknown))}")
    return ChatMessage(
        role=_ROLES[role],
        content=values.get("content", ""),
        reasoning_content=values.get("reasoning_content"),
        tool_call_id=values.get("tool_call_id", ""),
    )
