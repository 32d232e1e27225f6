"""From a gRPC `Generation` to a prepared request. Sampling values are never rewritten."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from shoal.common.v1 import sampling_pb2
from shoal.inference.v1 import chat_pb2, generation_pb2
from shoal_common.errors import InvalidArgument

from shoal_gateway.chat_fields import MAX_CACHE_POINTS, MAX_CHOICES, MAX_TOKENS, MAX_USER_ID_BYTES, RECIPE_MODEL
from shoal_gateway.constraint import of_message
from shoal_gateway.encode import EncodedConversation, Encoder, Prepared
from shoal_gateway.refusals import naming_what_is_too_long
from shoal_gateway.sampling import check_params, check_prompt_ids, fit_context
from shoal_gateway.text import OutputRecipe, plain_recipe

_MAX_STOPS = 16
_MAX_EFFORT = 100
_LARGE_PROMPT_BYTES = 32 * 1024
_POINTS_FIELD = "generation.chat.cache_points"
_PARAMS_PATH = "generation.sampling."
_ROLES = {
    chat_pb2.CHAT_ROLE_SYSTEM: "system",
    chat_pb2.CHAT_ROLE_USER: "user",
    chat_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    chat_pb2.CHAT_ROLE_TOOL: "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGeneration:
    """A generation and the form its output is wanted in."""

    request: Prepared
    model: str
    has_text: bool
    has_tokens: bool


async def prepare(generation: generation_pb2.Generation, encoder: Encoder) -> PreparedGeneration:
    """`prepare_now`, on a thread where the prompt is large."""
    if generation.ByteSize() < _LARGE_PROMPT_BYTES:
        return prepare_now(generation, encoder)
    return await asyncio.to_thread(prepare_now, generation, encoder)


def prepare_now(generation: generation_pb2.Generation, encoder: Encoder) -> PreparedGeneration:
    """The request behind a Generation. Raises InvalidArgument, which names the field, or ModelNotFound."""
    model = encoder.model
    if generation.model:
        model.check_name(generation.model)
    has_text, has_tokens = _forms(generation)
    params = sampling_pb2.SamplingParams()
    params.CopyFrom(generation.sampling)
    check_params(params, vocab_size=model.vocab_size, path=_PARAMS_PATH)
    _check_stops(generation, has_text)
    choice_count = generation.n if generation.HasField("n") else 1
    if not 1 <= choice_count <= MAX_CHOICES:
        raise InvalidArgument.at("generation.n", f"must be in [1, {MAX_CHOICES}], got {choice_count}")
    if len(generation.user_id.encode()) > MAX_USER_ID_BYTES:
        raise InvalidArgument.at("generation.user_id", f"must have at most {MAX_USER_ID_BYTES} bytes")
    ids, output, points = _prompt(generation, encoder)
    constraint = None
    if generation.HasField("constraint"):
        is_chat = generation.WhichOneof("prompt") == "chat"
        start = encoder.thinking_end(output.converted) if is_chat else ()
        constraint = of_message(generation.constraint, "generation.constraint", start)
    context = encoder.context_tokens
    wanted = params.max_tokens if params.HasField("max_tokens") else None
    with naming_what_is_too_long(f"generation.{generation.WhichOneof('prompt')}", "generation.sampling.max_tokens"):
        params.max_tokens = fit_context(len(ids), wanted, MAX_TOKENS, context)
    if params.min_tokens > params.max_tokens:
        raise InvalidArgument.at("generation.sampling.min_tokens", f"must be at most max_tokens, {params.max_tokens}")
    if not params.HasField("seed"):
        params.seed = encoder.new_seed()
    if generation.determinism not in sampling_pb2.Determinism.values():
        raise InvalidArgument.at("generation.determinism", f"is unknown, got {generation.determinism}")
    request = Prepared(
        prompt_ids=ids,
        params=params,
        choice_count=choice_count,
        user_id=generation.user_id,
        output=output if has_text else None,
        is_exact=generation.determinism == sampling_pb2.DETERMINISM_EXACT,
        params_path=_PARAMS_PATH,
        constraint=constraint,
        cache_points=points,
    )
    return PreparedGeneration(
        request=request, model=generation.model or model.name, has_text=has_text, has_tokens=has_tokens
    )


def _forms(generation: generation_pb2.Generation) -> tuple[bool, bool]:
    """Whether text and whether tokens are wanted."""
    form = generation.output_form
    if form == generation_pb2.OUTPUT_FORM_UNSPECIFIED:
        is_tokens = generation.WhichOneof("prompt") == "tokens"
        return not is_tokens, is_tokens
    if form not in generation_pb2.OutputForm.values():
        raise InvalidArgument.at("generation.output_form", f"is unknown, got {form}")
    return form != generation_pb2.OUTPUT_FORM_TOKENS, form != generation_pb2.OUTPUT_FORM_TEXT


def _check_stops(generation: generation_pb2.Generation, has_text: bool) -> None:
    if generation.stop and not has_text:
        raise InvalidArgument.at("generation.stop", "needs an output form with text")
    if len(generation.stop) > _MAX_STOPS:
        raise InvalidArgument.at("generation.stop", f"must have at most {_MAX_STOPS} entries")
    for index, stop in enumerate(generation.stop):
        if not stop:
            raise InvalidArgument.at(f"generation.stop[{index}]", "must not be empty")


def _prompt(generation: generation_pb2.Generation, encoder: Encoder) -> tuple[list[int], OutputRecipe, tuple[int, ...]]:
    """Ids, how the output is read, and the prompt tokens after which a snapshot is kept."""
    model = encoder.model
    kind = generation.WhichOneof("prompt")
    if kind == "chat":
        encoded = _chat(generation, encoder)
        points = encoder.cache_points(encoded, generation.chat.cache_points, _POINTS_FIELD)
        return encoded.prompt_ids, encoded.output(model.eos_id, generation.sampling.stop_token_ids), points
    if kind == "text":
        ids = [model.bos_id, *encoder.raw_text(generation.text)]
    elif kind == "tokens":
        ids = list(generation.tokens.ids)
        check_prompt_ids(ids, vocab_size=model.vocab_size, path="generation.tokens.ids")
    else:
        raise InvalidArgument.at("generation.prompt", "one of chat, text and tokens is required")
    hidden = frozenset((model.eos_id, *generation.sampling.stop_token_ids))
    return ids, plain_recipe(generation.stop, hidden), ()


def _chat(generation: generation_pb2.Generation, encoder: Encoder) -> EncodedConversation:
    chat = generation.chat
    if not chat.messages:
        raise InvalidArgument.at("generation.chat.messages", "must hold at least one message")
    if len(chat.cache_points) > MAX_CACHE_POINTS:
        raise InvalidArgument.at(_POINTS_FIELD, f"must have at most {MAX_CACHE_POINTS} entries")
    body: dict[str, Any] = {
        "model": RECIPE_MODEL,
        "messages": [_message(message, index) for index, message in enumerate(chat.messages)],
        "stop": list(generation.stop),
    }
    if chat.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(chat.tools)]
    effort = chat.reasoning_effort if chat.HasField("reasoning_effort") else None
    if effort is not None and effort > _MAX_EFFORT:
        raise InvalidArgument.at("generation.chat.reasoning_effort", f"must be in [0, {_MAX_EFFORT}], got {effort}")
    if effort is not None:
        body["reasoning_effort"] = "high" if effort else "none"
    try:
        return encoder.conversation(body, effort or None)
    except InvalidArgument as error:
        if not error.violations:
            raise InvalidArgument.at("generation.chat", error.message, reason=error.reason) from error
        wrong = error.violations[0]
        # The description is without the path that the message names in the body's own spelling.
        raise InvalidArgument.at(_field_of(wrong.field), wrong.description, reason=error.reason) from error


def _field_of(field: str) -> str:
    """A field of the body above as it is called in a Generation."""
    if field.startswith("stop"):
        return f"generation.{field}"
    field = field.replace(".function.", ".")
    if field.startswith("tools"):
        return "generation.chat." + field.replace(".parameters", ".parameters_json_schema")
    return "generation.chat." + field.replace(".arguments", ".arguments_json")


def _message(message: chat_pb2.ChatMessage, index: int) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgument.at(f"generation.chat.messages[{index}].role", "is required")
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.HasField("reasoning_content"):
        made["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    if role == "tool":
        made["tool_call_id"] = message.tool_call_id
    return made


def _tool(tool: chat_pb2.Tool, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json_schema:
        try:
            function["parameters"] = orjson.loads(tool.parameters_json_schema)
        except orjson.JSONDecodeError as error:
            path = f"generation.chat.tools[{index}].parameters_json_schema"
            raise InvalidArgument.at(path, f"is not valid JSON: {error}") from error
    return {"type": "function", "function": function}
