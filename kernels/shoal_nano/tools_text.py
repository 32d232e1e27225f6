"""The recipe's fixed tools text, read from the recipe library itself."""

from __future__ import annotations

import deepseek_recipe as recipe

from shoal_nano.prompt import ToolsTexts, dump
from shoal_nano.tokenizer import SYSTEM, USER


def tools_texts() -> ToolsTexts:
    """Render one conversation with one tool and cut the text around the tool's schema."""
    tool = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "probe"}],
        "tools": [{"type": "function", "function": tool}],
        "reasoning_effort": "none",
    }
    conversation = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions()).conversation
    prompt: str = recipe.DeepseekV41Encoding().render_conversation(conversation).prompt
    section = prompt.split(SYSTEM, 1)[1].rsplit(USER, 1)[0]
    before, after = section.split(dump(tool))
    return ToolsTexts(before=before.removeprefix("\n\n"), after=after)
