"""From a client's request to prompt ids, sampling parameters, and how the output is to be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_recipe import (
    Conversation,
    ConversationRequest,
    ConversionOptions,
    DeepseekV41Encoding,
    ReasoningContentBehavior,
    SpecialToken,
    SpecialTokens,
    Tokenizer,
    UserMessage,
)
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import InvalidArgument, MeshError

from shoal_gateway.bad_words import add_bad_words
from shoal_gateway.blame import bracketed
from shoal_gateway.cache_points import cache_points
from shoal_gateway.chat_fields import ChatFields
from shoal_gateway.constraint import AskedConstraint, of_conversation, with_grammar
from shoal_gateway.dialect import CHAT_DIALECT, Dialect
from shoal_gateway.output_shape import OutputShape
from shoal_gateway.recipe_calls import convert, of_recipe
from shoal_gateway.refusals import naming_what_is_too_long
from shoal_gateway.sampling import as_asked, chat_params, fit_context
from shoal_gateway.served_model import ServedModel
from shoal_gateway.text import OutputRecipe
from shoal_gateway.unseen import images_unsupported, refuse_unseen

LARGE_BODY_BYTES = 32 * 1024
"""From here on encoding takes longer than a step should wait for: it goes to a thread."""
_EFFORT_LINE = "Reasoning Effort: {} (range 1-100,"
_EFFORT_AT = 2
"""The line comes after begin-of-sequence and System."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request ready to be placed."""

    prompt_ids: list[int]
    params: sampling_pb2.SamplingParams
    """Complete: seed and max_tokens are set."""
    choice_count: int
    user_id: str
    """The caller's own end user, whose prefixes and turn in the queue are apart from those of others."""
    output: OutputRecipe | None
    """None where only tokens are wanted."""
    is_exact: bool = False
    """Fails rather than being answered by, or going on with, other numerics."""
    params_path: str = ""
    """Where the client wrote `params`; see `sampling.as_asked`."""
    constraint: AskedConstraint | None = None
    """What every choice is held to."""
    cache_points: tuple[int, ...] = ()
    """Prompt tokens after which a snapshot is kept, ascending."""
    tenant: str = ""
    """Whose request it is: of its API key; empty without keys."""
    priority: int = 0
    """Greater goes first; of its API key."""

    def as_asked(self, error: MeshError) -> MeshError:
        """A worker's error, naming the client's own field."""
        if self.constraint is not None:
            error = self.constraint.as_asked(error)
        return as_asked(error, self.params_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat request and what its answer has to look like."""

    request: Prepared
    model: str
    is_stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedConversation:
    """A conversation as prompt ids, and how the answer to it is to be read."""

    converted: ConversationRequest
    shape: OutputShape
    effort_number: int | None
    prompt_ids: list[int]

    def output(self, eos_id: int, stop_token_ids: Iterable[int]) -> OutputRecipe:
        """How to read the output."""
        parsing = self.converted.parsing_options
        return OutputRecipe(
            converted=self.converted,
            parsing=parsing,
            has_tools=bool(self.converted.conversation.tools) and parsing.parse_tool_calls,
            hidden_ids=frozenset((eos_id, *stop_token_ids)),
            shape=self.shape,
        )


class Encoder:
    """Encodes prompts for one model. Everything about the prompt's form is the recipe's.

    context    tokens that prompt and output may have together; asked anew for every request
    draw_seed  makes a seed for those who sent none
    """

    def __init__(
        self, model: ServedModel, tokenizer: Tokenizer, *, context: Callable[[], int], draw_seed: Callable[[], int]
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._context, self._draw_seed = context, draw_seed
        special = SpecialTokens(image=model.image_token)
        # As the hosted API: a thought has to come back on turns that called tools.
        options = ConversionOptions().with_reasoning_content_behavior(ReasoningContentBehavior.Reject)
        self._options = options.with_special_tokens(special)
        self._encoding = DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(tokenizer)
        self._effort_ids = tokenizer.encode(_EFFORT_LINE.format(75))
        # Begin-of-sequence and User; Assistant and the end of a thought that there was none of.
        self._frame = self._as_user("")
        self._thinking_end = tuple(tokenizer.encode(special.token(SpecialToken.ThinkingEnd)))

    @property
    def context_tokens(self) -> int:
        """What prompt and output may have together now."""
        return min(self.model.max_context_tokens, self._context())

    def new_seed(self) -> int:
        """A seed for a request that has none."""
        return self._draw_seed()

    async def chat(self, body: dict[str, Any], size_bytes: int, dialect: Dialect = CHAT_DIALECT) -> PreparedChat:
        """`chat_now`, on a thread where the body is large. The recipe lets other threads run."""
        if size_bytes < LARGE_BODY_BYTES:
            return self.chat_now(body, dialect)
        return await asyncio.to_thread(self.chat_now, body, dialect)

    def chat_now(self, body: dict[str, Any], dialect: Dialect = CHAT_DIALECT) -> PreparedChat:
        """A request with a conversation. Raises InvalidArgument or ModelNotFound, whatever the body holds."""
        fields = dialect.read(body, self.model)
        conversation = self._conversation(dialect, fields, body)
        converted, ids = conversation.converted, conversation.prompt_ids
        params = chat_params(
            fields,
            converted.inference_options,
            is_thinking=converted.conversation.thinking_mode,
            max_tokens=self._max_tokens(converted, fields, len(ids), dialect, body),
            seed=self._draw_seed() if fields.seed is None else fields.seed,
        )
        add_bad_words(params, fields.bad_words, self.tokenizer)
        request = Prepared(
            prompt_ids=ids,
            params=params,
            choice_count=fields.choice_count,
            user_id=fields.user_id,
            output=conversation.output(self.model.eos_id, fields.stop_token_ids),
            is_exact=fields.is_exact,
            cache_points=self.cache_points(conversation, fields.cache_points, "shoal.cache_points"),
            constraint=with_grammar(
                of_conversation(
                    converted,
                    fields=dialect.constraint_fields,
                    sent_schemas=dialect.tool_schemas(body),
                    strict_tools=of_recipe(lambda: dialect.strict_tools(body, self._options)),
                    is_parallel=fields.is_parallel,
                    demands_call=dialect.demands_call(body),
                    content_schema=dialect.content_schema(body),
                    start_after_ids=self.thinking_end(converted),
                ),
                fields.ebnf,
                has_tools=bool(converted.conversation.tools),
                start_after_ids=self.thinking_end(converted),
            ),
        )
        return PreparedChat(
            request=request, model=fields.model, is_stream=fields.is_stream, include_usage=fields.include_usage
        )

    def conversation(self, body: dict[str, Any], effort_number: int | None) -> EncodedConversation:
        """A chat body as the recipe takes it, encoded. Raises InvalidArgument for whatever the recipe does not like."""
        return self._encoded(CHAT_DIALECT, body, effort_number, self.model.name)

    async def count_tokens(self, body: dict[str, Any], size_bytes: int, dialect: Dialect) -> int:
        """Prompt tokens of a request that may be too long for any context. Raises as `chat` does."""

        def count() -> int:
            fields = dialect.read(body, self.model)
            # No token of the prompt, and refused alike where it is none.
            dialect.content_schema(body)
            return len(self._conversation(dialect, fields, body).prompt_ids)

        return count() if size_bytes < LARGE_BODY_BYTES else await asyncio.to_thread(count)

    def cache_points(self, encoded: EncodedConversation, messages: Sequence[int], field: str) -> tuple[int, ...]:
        """Prompt tokens after these messages, by index, ascending. Raises InvalidArgument, which names the `field`."""

        def encode(conversation: Conversation) -> list[int]:
            return self._encode(conversation, encoded.effort_number)

        return cache_points(encoded.converted.conversation, encoded.prompt_ids, messages, encode, field)

    def thinking_end(self, converted: ConversationRequest) -> tuple[int, ...]:
        """Tokens behind which the answer proper begins; none where it begins at once."""
        parsing = converted.parsing_options
        stage = parsing.thinking_initial_stage
        if parsing.starts_in_tool_calls or stage is None or not stage.starts_in_reasoning():
            return ()
        return self._thinking_end

    def raw_text(self, text: str) -> list[int]:
        """Ids of text as it stands; spellings of special tokens become these tokens. Nothing is put in front."""
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise InvalidArgument("the text is not valid Unicode", reason="INVALID_TEXT") from error

    def plain_text(self, text: str) -> list[int]:
        """Ids of text as a prompt holds what a user wrote: no spelling becomes a special token."""
        ids = of_recipe(lambda: self._as_user(text))
        if (ids[:2], ids[-2:]) != (self._frame[:2], self._frame[2:]):
            raise RuntimeError("the recipe's prompt does not hold the text between two tokens and two")
        return ids[2:-2]

    def _as_user(self, text: str) -> list[int]:
        return self._encoding.encode(Conversation([UserMessage(text)], thinking_mode=False))

    def _max_tokens(
        self,
        converted: ConversationRequest,
        fields: ChatFields,
        prompt_tokens: int,
        dialect: Dialect,
        body: dict[str, Any],
    ) -> int:
        context = self.context_tokens
        names = dialect.max_tokens_fields
        with naming_what_is_too_long(dialect.prompt_field, next((one for one in names if body.get(one)), names[0])):
            default = fit_context(prompt_tokens, fields.max_tokens, context, context)
        if fields.max_tokens is not None:
            return default
        return of_recipe(lambda: converted.resolve_max_tokens(prompt_tokens, context))

    def _conversation(self, dialect: Dialect, fields: ChatFields, body: dict[str, Any]) -> EncodedConversation:
        return self._encoded(dialect, dialect.recipe_body(body, fields), fields.effort_number, fields.model)

    def _encoded(
        self, dialect: Dialect, body: dict[str, Any], effort_number: int | None, model: str
    ) -> EncodedConversation:
        refuse_unseen(body)
        converted, shape = convert(dialect, body, self._options, model)
        for message in converted.conversation.messages:
            for source in message.image_sources:
                raise images_unsupported(bracketed(source.path))
        ids = self._encode(converted.conversation, effort_number)
        return EncodedConversation(converted=converted, shape=shape, effort_number=effort_number, prompt_ids=ids)

    def _encode(self, conversation: Conversation, effort_number: int | None) -> list[int]:
        ids = of_recipe(lambda: self._encoding.encode(conversation))
        if effort_number is None or not conversation.thinking_mode:
            return ids
        # The recipe writes its tiers' numbers only; any other takes the place of the 75 it was told to write.
        end = _EFFORT_AT + len(self._effort_ids)
        if ids[_EFFORT_AT:end] != self._effort_ids:
            raise RuntimeError("the recipe's prompt does not begin with its effort line")
        return ids[:_EFFORT_AT] + self.tokenizer.encode(_EFFORT_LINE.format(effort_number)) + ids[end:]
