"""Calling the recipe: whatever it raises about a body, the body is wrong, and the error names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from deepseek_recipe import ConversationRequest, ConversionError, ConversionOptions
from shoal_common.constraints import invalid
from shoal_common.errors import InvalidArgument

from shoal_gateway.blame import blamed, refused_at
from shoal_gateway.chat_fields import RECIPE_MODEL
from shoal_gateway.constraint import ConstraintFields
from shoal_gateway.dialect import Dialect
from shoal_gateway.output_shape import OutputShape
from shoal_gateway.schema_depth import check_depth

T = TypeVar("T")
_HI = [{"role": "user", "content": "Hi"}]


def convert(
    dialect: Dialect, body: dict[str, Any], options: ConversionOptions, model: str
) -> tuple[ConversationRequest, OutputShape]:
    """See Dialect.convert. Raises InvalidArgument."""

    def said(some: dict[str, Any]) -> str | None:
        try:
            of_recipe(lambda: dialect.convert(some, options, model))
        except InvalidArgument as error:
            return error.message
        return None

    check_depth(body)
    try:
        return of_recipe(lambda: dialect.convert(body, options, model))
    except InvalidArgument as error:
        least = {"model": RECIPE_MODEL, dialect.prompt_field: _HI}
        field = blamed(error.message, body, least, said)
        if field is None:
            raise
        if _is_schema(field, dialect.constraint_fields):
            # As invalid as a schema that we refuse.
            raise invalid(field, error.message) from error
        raise refused_at(field, error.message) from error


def of_recipe(call: Callable[[], T]) -> T:
    """What the recipe says to `call`. Whatever it raises about a body, the body is wrong."""
    try:
        return call()
    except ConversionError as error:
        raise InvalidArgument(_message(error)) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"the request cannot be read: {error}") from error
    except RuntimeError as error:
        raise InvalidArgument(f"the messages cannot be encoded: {error}") from error


def _is_schema(field: str, fields: ConstraintFields) -> bool:
    return field.startswith(fields.schema) or bool(re.match(rf"tools\[\d+\]\.{re.escape(fields.parameters)}\b", field))


def _message(error: ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
