"""POST /v1/chat/completions: from a body to a request and the form of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shoal_gateway.answer import Answer
from shoal_gateway.encode import Encoder
from shoal_gateway.http.form import PreparedAnswer
from shoal_gateway.http.forms.chat import ChatForm
from shoal_gateway.sampling import applied


class Chat:
    """Prepares chat completions for the endpoint."""

    def __init__(self, encoder: Encoder, clock: Callable[[], float] = time.time) -> None:
        self._encoder, self._clock = encoder, clock

    async def prepare(self, body: dict[str, Any], size_bytes: int) -> PreparedAnswer:
        """Raises InvalidArgument or ModelNotFound."""
        prepared = await self._encoder.chat(body, size_bytes)
        request = prepared.request
        output = request.output

        def form(answer: Answer) -> ChatForm:
            return ChatForm(
                answer_id=f"chatcmpl-{answer.request_id}",
                model=prepared.model,
                created_s=int(self._clock()),
                choice_count=request.choice_count,
                extension={"seed": request.params.seed, "applied": applied(request.params)},
                include_usage=prepared.include_usage,
                is_thinking=output is not None and output.converted.conversation.thinking_mode,
                tokenizer=self._encoder.tokenizer,
            )

        return PreparedAnswer(request=request, is_stream=prepared.is_stream, form=form)
