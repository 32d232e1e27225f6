"""What is different between the APIs that carry conversations: their fields, the recipe's converter, its generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionOptions,
    MessagesRequest,
    ResponsesRequest,
)
from shoal_common.errors import InvalidArgument

from shoal_gateway.chat_fields import RECIPE_MODEL, ChatFields, read_chat_fields, recipe_body
from shoal_gateway.constraint import ConstraintFields
from shoal_gateway.fields import Fields
from shoal_gateway.messages_fields import messages_body, read_messages_fields
from shoal_gateway.output_shape import CHAT, MessagesShape, OutputShape, ResponsesShape
from shoal_gateway.responses_fields import read_responses_fields, responses_body
from shoal_gateway.served_model import ServedModel

ToolSchemas: TypeAlias = Mapping[str, Any]
"""By the name of the tool, the schema of its arguments as the client sent it."""


class Dialect(Protocol):
    """One API. Raises InvalidArgument, which names the field, wherever the body is wrong."""

    @property
    def constraint_fields(self) -> ConstraintFields:
        """Where constraints are written."""

    @property
    def prompt_field(self) -> str:
        """Where the conversation is written."""

    @property
    def max_tokens_fields(self) -> tuple[str, ...]:
        """Where the length of the answer is written; of several, the first that is there counts."""

    def read(self, body: dict[str, Any], model: ServedModel) -> ChatFields:
        """The fields that Shoal reads itself, the model's name checked."""

    def recipe_body(self, body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
        """The body as the recipe takes it."""

    def convert(
        self, recipe_body: dict[str, Any], options: ConversionOptions, model: str
    ) -> tuple[ConversationRequest, OutputShape]:
        """The conversation, and what makes chunks of its output. Raises what the recipe does."""

    def tool_schemas(self, body: dict[str, Any]) -> ToolSchemas:
        """Of the client's own tools, which the recipe has taken."""

    def strict_tools(self, body: dict[str, Any], options: ConversionOptions) -> str | None:
        """Where the recipe's converter forgets which tools are strict: its list of tools with that."""

    def demands_call(self, body: dict[str, Any]) -> bool:
        """Whether some tool must be called and the recipe's converter does not see to it."""

    def content_schema(self, body: dict[str, Any]) -> Any:
        """What the text must fit, where the recipe's converter leaves that out; None: the converter knows."""


class ChatDialect:
    """Chat Completions."""

    constraint_fields = ConstraintFields(
        form="response_format", schema="response_format.json_schema.schema", parameters="function.parameters"
    )
    prompt_field = "messages"
    max_tokens_fields = ("max_completion_tokens", "max_tokens")

    def read(self, body: dict[str, Any], model: ServedModel) -> ChatFields:
        """See Dialect. Raises ModelNotFound."""
        fields = read_chat_fields(body, model.vocab_size)
        model.check_name(fields.model)
        return fields

    def recipe_body(self, body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
        """See Dialect."""
        return recipe_body(body, fields)

    def convert(
        self, recipe_body: dict[str, Any], options: ConversionOptions, model: str
    ) -> tuple[ConversationRequest, OutputShape]:
        """See Dialect."""
        return ChatCompletionRequest(recipe_body).convert(options), CHAT

    def tool_schemas(self, body: dict[str, Any]) -> ToolSchemas:
        """See Dialect."""
        functions = [tool.get("function") for tool in _objects(body.get("tools"))]
        return _schemas([one for one in functions if isinstance(one, dict)], "parameters")

    def strict_tools(self, body: dict[str, Any], options: ConversionOptions) -> str | None:
        """The converter knows."""
        return None

    def demands_call(self, body: dict[str, Any]) -> bool:
        """The converter sees to it."""
        return False

    def content_schema(self, body: dict[str, Any]) -> Any:
        """The converter knows."""
        return None


class MessagesDialect:
    """Anthropic Messages."""

    constraint_fields = ConstraintFields(
        form="output_config.format", schema="output_config.format.schema", parameters="input_schema"
    )
    prompt_field = "messages"
    max_tokens_fields = ("max_tokens",)

    def read(self, body: dict[str, Any], model: ServedModel) -> ChatFields:
        """See Dialect. What is named claude... is the one model: tools for Anthropic's API ask for nothing else."""
        fields = read_messages_fields(body, model.vocab_size)
        if fields.model.startswith("claude"):
            return replace(fields, model=model.name)
        if not model.has_name(fields.model):
            raise InvalidArgument.at(
                "model", f"{fields.model!r} is unknown; {model.name} is served", reason="MODEL_NOT_FOUND"
            )
        return fields

    def recipe_body(self, body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
        """See Dialect."""
        return messages_body(body, fields)

    def convert(
        self, recipe_body: dict[str, Any], options: ConversionOptions, model: str
    ) -> tuple[ConversationRequest, OutputShape]:
        """See Dialect."""
        return MessagesRequest(recipe_body).convert(options), MessagesShape(model=model)

    def tool_schemas(self, body: dict[str, Any]) -> ToolSchemas:
        """See Dialect."""
        return _schemas(_objects(body.get("tools")), "input_schema")

    def strict_tools(self, body: dict[str, Any], options: ConversionOptions) -> str | None:
        """As the converter of Chat understands them."""
        tools = _objects(body.get("tools"))
        if not any(tool.get("strict") is True for tool in tools):
            return None
        functions = [
            {"name": tool.get("name"), "parameters": tool.get("input_schema"), "strict": tool.get("strict") is True}
            for tool in tools
        ]
        as_chat = {
            "model": RECIPE_MODEL,
            "messages": [{"role": "user", "content": ""}],
            "tools": [{"type": "function", "function": function} for function in functions],
        }
        wanted = ChatCompletionRequest(as_chat).convert(options).inference_options.output_constraint
        return None if wanted is None else wanted.schema

    def demands_call(self, body: dict[str, Any]) -> bool:
        """The converter takes `any` for `auto`."""
        choice = body.get("tool_choice")
        return isinstance(choice, dict) and choice.get("type") == "any"

    def content_schema(self, body: dict[str, Any]) -> Any:
        """The converter leaves `output_config.format` out."""
        form = (Fields(body).mapping("output_config") or Fields({})).mapping("format")
        if form is None:
            return None
        if form.text("type", 64) != "json_schema":
            raise InvalidArgument.at(form.name("type"), 'must be "json_schema"')
        if form.mapping("schema") is None:
            raise InvalidArgument.at(form.name("schema"), "is required")
        return body["output_config"]["format"]["schema"]


class ResponsesDialect:
    """Responses."""

    constraint_fields = ConstraintFields(form="text.format", schema="text.format.schema", parameters="parameters")
    prompt_field = "input"
    max_tokens_fields = ("max_output_tokens",)

    def read(self, body: dict[str, Any], model: ServedModel) -> ChatFields:
        """See Dialect. Raises ModelNotFound."""
        fields = read_responses_fields(body, model.vocab_size)
        model.check_name(fields.model)
        return fields

    def recipe_body(self, body: dict[str, Any], fields: ChatFields) -> dict[str, Any]:
        """See Dialect."""
        return responses_body(body, fields)

    def convert(
        self, recipe_body: dict[str, Any], options: ConversionOptions, model: str
    ) -> tuple[ConversationRequest, OutputShape]:
        """See Dialect."""
        request = ResponsesRequest(recipe_body)
        echo, namespaces = request.echo(), request.namespace_tool_map(options)
        return request.convert(options), ResponsesShape(model=model, echo=echo, namespaces=namespaces)

    def tool_schemas(self, body: dict[str, Any]) -> ToolSchemas:
        """See Dialect."""
        return _schemas(_objects(body.get("tools")), "parameters")

    def strict_tools(self, body: dict[str, Any], options: ConversionOptions) -> str | None:
        """The converter knows."""
        return None

    def demands_call(self, body: dict[str, Any]) -> bool:
        """The converter sees to it."""
        return False

    def content_schema(self, body: dict[str, Any]) -> Any:
        """The converter knows."""
        return None


CHAT_DIALECT = ChatDialect()
MESSAGES_DIALECT = MessagesDialect()
RESPONSES_DIALECT = ResponsesDialect()


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _schemas(tools: list[dict[str, Any]], key: str) -> ToolSchemas:
    return {tool["name"]: tool.get(key) for tool in tools if isinstance(tool.get("name"), str)}
