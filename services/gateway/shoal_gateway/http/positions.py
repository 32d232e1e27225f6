"""Log-probabilities of tokens as JSON objects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepseek_recipe import Tokenizer
from shoal.common.v1 import tokens_pb2

from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.text import detokenize


def position_objects(positions: Sequence[tokens_pb2.PositionLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Per position its token with `top_logprobs`, each as {token_id, token, logprob}."""
    texts: dict[int, str] = {}

    def shown(one: tokens_pb2.TokenLogprob) -> dict[str, Any]:
        if one.token_id not in texts:
            texts[one.token_id] = detokenize([one.token_id], tokenizer)
        return {"token_id": one.token_id, "token": texts[one.token_id], "logprob": one.logprob}

    return [{**shown(one.emitted), "top_logprobs": [shown(other) for other in one.top]} for one in positions]


def prompt_report(output: ChoiceOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the extension says of the prompt's tokens, in the one output that has it."""
    if not output.prompt_logprobs:
        return {}
    return {"prompt_logprobs": position_objects(output.prompt_logprobs, tokenizer)}
