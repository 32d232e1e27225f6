"""Training prompts are the recipe's prompts, token for token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
import shoal_nano
from shoal_nano.packing import DialogueEncoder
from shoal_nano.prompt import Dialogue, dump, render
from shoal_nano.tasks import FAMILIES, make_item
from shoal_nano.tools_text import tools_texts
from tokenizers import Tokenizer

TOKENIZER = str(Path(shoal_nano.__file__).parent / "release" / "tokenizer.json")
EFFORT_TIERS = {50: "low", 75: "medium", 100: "max"}


def _request(dialogue: Dialogue) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    for i, turn in enumerate(dialogue.turns):
        if turn.is_tool_result:
            messages.append({"role": "tool", "tool_call_id": f"c{i - 1}", "content": turn.user})
        else:
            messages.append({"role": "user", "content": turn.user})
        if i == len(dialogue.turns) - 1:
            break
        answer: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if dialogue.is_thinking:
            answer["reasoning_content"] = turn.reasoning
        if turn.calls:
            call = turn.calls[0]
            function = {"name": call.name, "arguments": dump(call.arguments)}
            answer["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": function}]
        messages.append(answer)
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    body["reasoning_effort"] = EFFORT_TIERS[dialogue.effort] if dialogue.is_thinking else "none"
    if dialogue.tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in dialogue.tools]
    if dialogue.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": dialogue.schema}}
    return body


@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_items_equal_the_recipe(family: str) -> None:
    rng = random.Random(f"prompt {family}")
    encoder = DialogueEncoder(Tokenizer.from_file(TOKENIZER))
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image="<｜deepseek_image｜>"))
    encoding = encoding.with_tokenizer(recipe.Tokenizer.from_file(TOKENIZER))
    compared = 0
    while compared < 8:
        dialogue = make_item(family, rng, held_out=False).dialogue
        if dialogue.effort not in EFFORT_TIERS:
            continue
        conversation = recipe.ChatCompletionRequest(_request(dialogue)).convert(recipe.ConversionOptions()).conversation
        rendered = render(dialogue, tools_texts())
        document = encoder.encode(rendered, family, 1.0)
        assert document.ids[: document.prompt_length] == encoding.encode(conversation)
        compared += 1
