"""One conversation with tools in each of the three API shapes, as their SDKs speak them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

MODEL = "deepseek-flash"
ADD: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
    "required": ["a", "b"],
}
"""In the order in which the recipe writes a strict tool of Chat, so that all shapes make the same prompt."""
DESCRIPTION = "Add two numbers."
_PATIENCE: Mapping[str, Any] = {"max_retries": 0, "timeout": 60}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What an answer said, in no API's own terms."""

    thinking: str
    text: str
    calls: tuple[tuple[str, str, Any], ...]
    """Id, name, arguments."""
    end: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def content(self) -> tuple[str, str, list[tuple[str, Any]]]:
        """All that must be equal where prompt, parameters and seed are; ids of calls are drawn."""
        return self.thinking, self.text, [(name, arguments) for _, name, arguments in self.calls]


class ToolTalk(ABC):
    """What was said so far. Every answer joins it as the SDK gave it, as a program would pass it back.

    seed, temperature   of every answer
    is_thinking         whether the model thinks
    forced_ids          tokens with which every answer begins; more than one call may come then
    """

    def __init__(
        self,
        http: str,
        *,
        seed: int,
        temperature: float,
        is_thinking: bool,
        user: str,
        forced_ids: Sequence[int] = (),
    ) -> None:
        self._http, self._seed, self._temperature = http, seed, temperature
        self._is_thinking, self._user = is_thinking, user
        self._is_parallel = bool(forced_ids)
        self._own: dict[str, Any] = {"shoal": {"forced_ids": list(forced_ids)}} if forced_ids else {}
        self._talk: list[Any] = []

    def ask(self, text: str) -> None:
        """The user's next turn."""
        self._talk.append({"role": "user", "content": text})

    def forced_no_more(self) -> None:
        """From here on the model says all tokens itself."""
        self._own = {}

    @abstractmethod
    def result(self, call_id: str, text: str) -> None:
        """What a tool gave."""

    @abstractmethod
    def answer(self, choice: str, *, is_streamed: bool) -> Said:
        """The model's next turn, with one tool `add`; choice auto, add (by its name), any or none."""


class ChatTalk(ToolTalk):
    """Chat Completions."""

    def result(self, call_id: str, text: str) -> None:
        """See ToolTalk."""
        self._talk.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def answer(self, choice: str, *, is_streamed: bool) -> Said:
        """See ToolTalk."""
        named = {"type": "function", "function": {"name": "add"}}
        function = {"name": "add", "description": DESCRIPTION, "parameters": ADD, "strict": True}
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": self._talk,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"add": named, "any": "required"}.get(choice, choice),
            "seed": self._seed,
            "temperature": self._temperature,
            "max_tokens": 300,
            "parallel_tool_calls": self._is_parallel,
            "extra_body": {
                "user_id": self._user,
                **self._own,
                **({} if self._is_thinking else {"thinking": {"type": "disabled"}}),
            },
        }
        client: Any = openai.OpenAI(base_url=f"{self._http}/v1", api_key="none", **_PATIENCE)
        if is_streamed:
            with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                made = stream.get_final_completion()
        else:
            made = client.chat.completions.create(**fields)
        [chosen] = made.choices
        message = chosen.message
        self._talk.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = [(one.id, one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]
        return Said(
            thinking=getattr(message, "reasoning_content", None) or "",
            text=message.content or "",
            calls=tuple(calls),
            end={"tool_calls": "calls"}.get(chosen.finish_reason, chosen.finish_reason),
            prompt_tokens=made.usage.prompt_tokens,
            cached_tokens=made.usage.prompt_tokens_details.cached_tokens,
            output_tokens=made.usage.completion_tokens,
        )


class ResponsesTalk(ToolTalk):
    """Responses."""

    def result(self, call_id: str, text: str) -> None:
        """See ToolTalk."""
        self._talk.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def answer(self, choice: str, *, is_streamed: bool) -> Said:
        """See ToolTalk."""
        fields: dict[str, Any] = {
            "model": MODEL,
            "input": self._talk,
            "tools": [
                {"type": "function", "name": "add", "description": DESCRIPTION, "parameters": ADD, "strict": True}
            ],
            "tool_choice": {"add": {"type": "function", "name": "add"}, "any": "required"}.get(choice, choice),
            "temperature": self._temperature,
            "max_output_tokens": 300,
            "parallel_tool_calls": self._is_parallel,
            "extra_body": {"seed": self._seed, "user_id": self._user, **self._own},
            **({} if self._is_thinking else {"reasoning": {"effort": "none"}}),
        }
        client: Any = openai.OpenAI(base_url=f"{self._http}/v1", api_key="none", **_PATIENCE)
        if is_streamed:
            with client.responses.stream(**fields) as stream:
                made = stream.get_final_response()
        else:
            made = client.responses.create(**fields)
        items = made.output
        self._talk += [one.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for one in items]
        calls = [(one.call_id, one.name, json.loads(one.arguments)) for one in items if one.type == "function_call"]
        return Said(
            thinking="".join(part.text for one in items if one.type == "reasoning" for part in one.content),
            text=made.output_text,
            calls=tuple(calls),
            end="calls" if calls else {"completed": "stop"}.get(made.status, made.status),
            prompt_tokens=made.usage.input_tokens,
            cached_tokens=made.usage.input_tokens_details.cached_tokens,
            output_tokens=made.usage.output_tokens,
        )


class MessagesTalk(ToolTalk):
    """Anthropic Messages."""

    def result(self, call_id: str, text: str) -> None:
        """See ToolTalk."""
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        # All results of one turn come in one message.
        if self._talk[-1]["role"] == "assistant":
            self._talk.append({"role": "user", "content": []})
        self._talk[-1]["content"].append(block)

    def answer(self, choice: str, *, is_streamed: bool) -> Said:
        """See ToolTalk."""
        chosen: dict[str, Any] = {"type": "tool", "name": "add"} if choice == "add" else {"type": choice}
        if choice != "none":
            chosen["disable_parallel_tool_use"] = not self._is_parallel
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": self._talk,
            "tools": [{"name": "add", "description": DESCRIPTION, "input_schema": ADD, "strict": True}],
            "tool_choice": chosen,
            "max_tokens": 300,
            "metadata": {"user_id": self._user},
            "thinking": {"type": "enabled", "budget_tokens": 1024} if self._is_thinking else {"type": "disabled"},
            "extra_body": {"seed": self._seed, "temperature": self._temperature, **self._own},
        }
        client: Any = anthropic.Anthropic(base_url=self._http, api_key="none", **_PATIENCE)
        if is_streamed:
            with client.messages.stream(**fields) as stream:
                made = stream.get_final_message()
        else:
            made = client.messages.create(**fields)
        # What the SDK's helper adds to its own objects is no part of the protocol.
        blocks = [one.model_dump(exclude_none=True, exclude={"parsed_output"}) for one in made.content]
        self._talk.append({"role": "assistant", "content": blocks})
        usage = made.usage
        return Said(
            thinking="".join(one.thinking for one in made.content if one.type == "thinking"),
            text="".join(one.text for one in made.content if one.type == "text"),
            calls=tuple((one.id, one.name, one.input) for one in made.content if one.type == "tool_use"),
            end={"tool_use": "calls", "end_turn": "stop"}.get(made.stop_reason, made.stop_reason),
            prompt_tokens=usage.input_tokens + usage.cache_read_input_tokens,
            cached_tokens=usage.cache_read_input_tokens,
            output_tokens=usage.output_tokens,
        )


SHAPES: Mapping[str, type[ToolTalk]] = {"chat": ChatTalk, "responses": ResponsesTalk, "messages": MessagesTalk}
