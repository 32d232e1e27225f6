"""From a completions body to the requests behind it, one per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.common.v1 import sampling_pb2
from shoal_common.errors import InvalidArgument

from shoal_gateway.bad_words import add_bad_words
from shoal_gateway.chat_fields import ChatFields
from shoal_gateway.completion_fields import CompletionFields, read_completion_fields
from shoal_gateway.constraint import of_response_format, with_grammar
from shoal_gateway.echo import Echo
from shoal_gateway.encode import LARGE_BODY_BYTES, Encoder, Prepared
from shoal_gateway.fill_in_the_middle import find_fim_tokens
from shoal_gateway.refusals import ContextLengthExceeded, too_long
from shoal_gateway.sampling import fit_context, set_min_tokens, text_params
from shoal_gateway.text import detokenize, plain_recipe

DEFAULT_MAX_TOKENS = 4096
"""What the hosted API gives a completion at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion:
    """The requests of one body and what their answer has to look like.

    requests   one per prompt, alike but for prompt_ids and max_tokens
    echoes     one per prompt, or none
    """

    requests: tuple[Prepared, ...]
    echoes: tuple[Echo, ...]
    model: str
    is_stream: bool
    include_usage: bool
    has_echo_logprobs: bool


class CompletionEncoder:
    """Prepares completions with the model and tokenizer of an Encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._fim = find_fim_tokens(encoder.tokenizer)

    async def prepare(self, body: Mapping[str, Any], size_bytes: int) -> PreparedCompletion:
        """`prepare_now`, on a thread where the body is large."""
        if size_bytes < LARGE_BODY_BYTES:
            return self.prepare_now(body)
        return await asyncio.to_thread(self.prepare_now, body)

    def prepare_now(self, body: Mapping[str, Any]) -> PreparedCompletion:
        """A completions request. Raises InvalidArgument or ModelNotFound, whatever the body holds."""
        model = self._encoder.model
        fields = read_completion_fields(body, model.vocab_size, model.max_context_tokens)
        common = fields.common
        model.check_name(common.model)
        has_echo_logprobs = fields.echo and fields.logprobs is not None
        params = text_params(
            common,
            top_logprobs=fields.logprobs,
            prompt_logprobs=fields.logprobs if has_echo_logprobs else common.prompt_logprobs,
            seed=self._encoder.new_seed() if common.seed is None else common.seed,
        )
        add_bad_words(params, common.bad_words, self._encoder.tokenizer)
        prompts = [self._prompt_ids(prompt, fields) for prompt in fields.prompts]
        template = Prepared(
            prompt_ids=[],
            params=params,
            choice_count=common.choice_count,
            user_id=common.user_id,
            output=plain_recipe(fields.stop, frozenset((model.eos_id, *common.stop_token_ids))),
            is_exact=common.is_exact,
            constraint=with_grammar(of_response_format(body.get("response_format")), common.ebnf),
        )
        return PreparedCompletion(
            requests=tuple(
                self._request(template, ids, common, f"prompt[{index}]" if len(prompts) > 1 else "prompt")
                for index, ids in enumerate(prompts)
            ),
            echoes=self._echoes(fields, prompts) if fields.echo else (),
            model=common.model,
            is_stream=common.is_stream,
            include_usage=common.include_usage,
            has_echo_logprobs=has_echo_logprobs,
        )

    def _request(self, template: Prepared, ids: list[int], common: ChatFields, field: str) -> Prepared:
        params = sampling_pb2.SamplingParams()
        params.CopyFrom(template.params)
        context = self._encoder.context_tokens
        try:
            params.max_tokens = fit_context(len(ids), common.max_tokens, DEFAULT_MAX_TOKENS, context)
        except ContextLengthExceeded as error:
            raise too_long(error, field, "max_tokens") from None
        set_min_tokens(params, common.min_tokens)
        return Prepared(
            prompt_ids=ids,
            params=params,
            choice_count=template.choice_count,
            user_id=template.user_id,
            output=template.output,
            is_exact=template.is_exact,
            constraint=template.constraint,
        )

    def _prompt_ids(self, prompt: str | tuple[int, ...], fields: CompletionFields) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        bos_id = self._encoder.model.bos_id
        if fields.suffix is None:
            return [bos_id, *self._encoder.raw_text(prompt)]
        if self._fim is None:
            raise InvalidArgument.at(
                "suffix",
                "is not supported: this model's tokenizer has no fill-in-the-middle tokens",
                reason="SUFFIX_UNSUPPORTED",
            )
        # Code that happens to spell a special token is still code.
        return self._fim.prompt(bos_id, self._encoder.plain_text(prompt), self._encoder.plain_text(fields.suffix))

    def _echoes(self, fields: CompletionFields, prompts: Sequence[list[int]]) -> tuple[Echo, ...]:
        return tuple(
            Echo(text=prompt, prompt_ids=ids, first=1)
            if isinstance(prompt, str)
            else Echo(text=detokenize(ids, self._encoder.tokenizer), prompt_ids=ids, first=0)
            for prompt, ids in zip(fields.prompts, prompts, strict=True)
        )
