"""Reading values out of a client's JSON: right type and range, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal_common.errors import InvalidArgument


class Fields:
    """Typed access to one JSON object. A missing field and null are both absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path = values, path

    def name(self, key: str) -> str:
        """The field's full path, for messages."""
        return f"{self._path}{key}"

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument.at(self.name(key), "must be an integer")
        if not low <= value <= high:
            raise InvalidArgument.at(self.name(key), f"must be in [{low}, {high}], got {value}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument.at(self.name(key), "must be a number")
        if not low <= value <= high:
            raise InvalidArgument.at(self.name(key), f"must be in [{low}, {high}], got {value}")
        return float(value)

    def effort_number(self, key: str) -> int | None:
        """An effort if it is given as a number, in [1, 100]; the recipe knows the names."""
        value = self._values.get(key)
        return self.integer(key, 1, 100) if isinstance(value, int | float) else None

    def boolean(self, key: str) -> bool | None:
        """true or false."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument.at(self.name(key), "must be true or false")
        return value

    def text(self, key: str, max_bytes: int) -> str | None:
        """A string of at most `max_bytes` in UTF-8."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise InvalidArgument.at(self.name(key), "must be a string")
        if len(value.encode()) > max_bytes:
            raise InvalidArgument.at(self.name(key), f"must have at most {max_bytes} bytes")
        return value

    def mapping(self, key: str) -> Fields | None:
        """A nested object."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidArgument.at(self.name(key), "must be an object")
        return Fields(value, f"{self.name(key)}.")

    def items(self, key: str, max_count: int) -> list[Any]:
        """A list of anything; nothing where it is absent."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InvalidArgument.at(self.name(key), "must be a list")
        if len(value) > max_count:
            raise InvalidArgument.at(self.name(key), f"must have at most {max_count} entries")
        return value

    def token_ids(self, key: str, vocab_size: int, max_count: int) -> list[int] | None:
        """A list of token ids."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise InvalidArgument.at(self.name(key), "must be a list of token ids")
        if len(value) > max_count:
            raise InvalidArgument.at(self.name(key), f"must have at most {max_count} entries")
        for index, token_id in enumerate(value):
            where = f"{self.name(key)}[{index}]"
            # An integer past 64 bits is read as a float.
            is_huge = isinstance(token_id, float) and abs(token_id) >= 2**63
            if isinstance(token_id, bool) or not (isinstance(token_id, int) or is_huge):
                raise InvalidArgument.at(where, "must be an integer")
            if not 0 <= token_id < vocab_size:
                raise InvalidArgument.at(
                    where,
                    f"must be a token id in [0, {vocab_size - 1}]",
                    reason="TOKEN_OUT_OF_RANGE",
                )
        return value

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Raises InvalidArgument for a field that is not one of `known`."""
        for key in self._values:
            if key not in known:
                shown = key if len(key) <= 100 else key[:100] + "..."
                raise InvalidArgument.at(
                    self.name(shown), f"is unknown; known are {', '.join(sorted(known))}", reason="UNKNOWN_FIELD"
                )
