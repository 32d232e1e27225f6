"""POST /v1/completions: from a body to the requests of its prompts and the form of their answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shoal_gateway.completions import CompletionEncoder
from shoal_gateway.encode import Encoder
from shoal_gateway.http.form import OpenAnswer, PreparedAnswer
from shoal_gateway.http.forms.completions import CompletionForm
from shoal_gateway.sampling import applied


class Completions:
    """Prepares completions for the endpoint."""

    def __init__(self, encoder: Encoder, clock: Callable[[], float] = time.time) -> None:
        self._encoder, self._clock = encoder, clock
        self._completions = CompletionEncoder(encoder)

    async def prepare(self, body: dict[str, Any], size_bytes: int) -> PreparedAnswer:
        """Raises InvalidArgument or ModelNotFound."""
        prepared = await self._completions.prepare(body, size_bytes)
        first = prepared.requests[0]

        def form(answer: OpenAnswer) -> CompletionForm:
            return CompletionForm(
                answer_id=f"cmpl-{answer.request_id}",
                model=prepared.model,
                created_s=int(self._clock()),
                choice_count=first.choice_count,
                prompt_count=len(prepared.requests),
                echoes=prepared.echoes,
                has_logprobs=first.params.HasField("top_logprobs"),
                has_echo_logprobs=prepared.has_echo_logprobs,
                extension={"seed": first.params.seed, "applied": applied(first.params)},
                include_usage=prepared.include_usage,
                tokenizer=self._encoder.tokenizer,
            )

        return PreparedAnswer(request=first, others=prepared.requests[1:], is_stream=prepared.is_stream, form=form)
