"""V4.1's prompt template, enough of it to render training items without the recipe library.

The fixed English text of the tools section is not kept here: `tools_texts` takes it from the recipe once, on the machine
that prepares the data. A unit test compares whole prompts with the recipe's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from shoal_nano.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, SYSTEM, THINK, USER

Segment = tuple[bool, str]  # (is one special token, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call: the tool's name and its arguments in order."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A user text (or tool results) and the assistant's answer to it."""

    user: str
    answer: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    is_tool_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One conversation as a client sends it, with the wanted answers."""

    turns: tuple[Turn, ...]
    system: str = ""
    is_thinking: bool = False
    effort: int = 75
    tools: tuple[dict[str, object], ...] = ()
    schema: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsTexts:
    """What the recipe writes before and after the list of tool schemas. Raw text: `DSML` marks inside are special."""

    before: str
    after: str


@dataclass(slots=True)
class Rendered:
    """Segments of a conversation, and for each whether the model is trained to write it."""

    segments: list[Segment] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)

    def add(self, is_special: bool, text: str, answer: bool = False) -> None:
        if not text:
            return
        if not is_special and self.segments and not self.segments[-1][0] and self.is_answer[-1] == answer:
            self.segments[-1] = (False, self.segments[-1][1] + text)
            return
        self.segments.append((is_special, text))
        self.is_answer.append(answer)

    def add_marked(self, text: str, answer: bool = False) -> None:
        """Add text in which every DSML mark is the special token."""
        for i, piece in enumerate(text.split(DSML)):
            if i:
                self.add(True, DSML, answer)
            self.add(False, piece, answer)


def dump(value: object) -> str:
    """JSON as the template writes it."""
    return json.dumps(value, ensure_ascii=False)


def render_calls(calls: tuple[Call, ...]) -> str:
    """The calls block that follows an answer's content, with its leading blank line."""
    if not calls:
        return ""
    lines = ["", "", f"<{DSML} calls>"]
    for call in calls:
        lines.append(f'<{DSML} invoke name="{call.name}">')
        for key, value in call.arguments.items():
            is_string = isinstance(value, str)
            shown = value if is_string else dump(value)
            lines.append(f'<{DSML} parameter name="{key}" string="{str(is_string).lower()}">{shown}</{DSML} parameter>')
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


def _system(out: Rendered, dialogue: Dialogue, texts: ToolsTexts) -> None:
    if not (dialogue.is_thinking or dialogue.system or dialogue.tools or dialogue.schema is not None):
        return
    out.add(True, SYSTEM)
    if dialogue.is_thinking:
        scale = "(range 1-100, the higher the value, the more thorough the reasoning)"
        out.add(False, f"Reasoning Effort: {dialogue.effort} {scale}\n\n")
    out.add(False, dialogue.system)
    if dialogue.tools:
        out.add_marked("\n\n" + texts.before)
        out.add(False, "\n".join(dump(tool) for tool in dialogue.tools))
        out.add_marked(texts.after)
    if dialogue.schema is not None:
        head = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        out.add(False, f"\n\n{head}{dump(dialogue.schema)}")


def render(dialogue: Dialogue, texts: ToolsTexts) -> Rendered:
    """The whole conversation, answers included. The last turn's answer ends with EOS like every other.

    source  v41-flash.md section 14
    """
    out = Rendered()
    out.add(True, BOS)
    _system(out, dialogue, texts)
    last_user = max(i for i, turn in enumerate(dialogue.turns) if not turn.is_tool_result)
    for i, turn in enumerate(dialogue.turns):
        keeps_reasoning = dialogue.is_thinking and (bool(dialogue.tools) or i >= last_user)
        out.add(True, USER)
        out.add(False, f"<tool_result>{turn.user}</tool_result>" if turn.is_tool_result else turn.user)
        out.add(True, ASSISTANT)
        if keeps_reasoning:
            out.add(True, THINK)
            out.add(False, turn.reasoning, True)
            out.add(True, END_THINK, True)
        else:
            out.add(True, END_THINK)
        # A turn whose reasoning was dropped is history only if the model itself would have reasoned there.
        is_answer = keeps_reasoning or not dialogue.is_thinking
        out.add(False, turn.answer, is_answer)
        out.add_marked(render_calls(turn.calls), is_answer)
        out.add(True, EOS, is_answer)
    return out


def answer_text(turn: Turn) -> str:
    """What a right answer looks like as text, calls included."""
    return turn.answer + render_calls(turn.calls)
