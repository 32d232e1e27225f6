"""POST /v1/responses: create and stream. Nothing is stored."""

from __future__ import annotations

from typing import Any

from shoal_gateway.answer import Answer
from shoal_gateway.dialect import RESPONSES_DIALECT
from shoal_gateway.encode import Encoder
from shoal_gateway.http.form import PreparedAnswer
from shoal_gateway.http.forms.responses import ResponsesForm
from shoal_gateway.responses_fields import echoed
from shoal_gateway.sampling import applied
from shoal_gateway.text import ChoiceText


class Responses:
    """Prepares responses for the endpoint."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def prepare(self, body: dict[str, Any], size_bytes: int) -> PreparedAnswer:
        """Raises InvalidArgument or ModelNotFound."""
        repeated = echoed(body)
        prepared = await self._encoder.chat(body, size_bytes, RESPONSES_DIALECT)
        request, tokenizer = prepared.request, self._encoder.tokenizer
        output = request.output
        assert output is not None

        def form(answer: Answer) -> ResponsesForm:
            return ResponsesForm(
                opening=lambda: ChoiceText(output, tokenizer, answer.request_id).begin()[0].to_json(),
                echoed=repeated,
                extension={"seed": request.params.seed, "applied": applied(request.params)},
                tokenizer=tokenizer,
            )

        return PreparedAnswer(request=request, is_stream=prepared.is_stream, form=form)
