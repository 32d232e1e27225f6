"""Typed access to a JSON object: every failure names the file, the field and what was expected."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from shoal_model.errors import CheckpointError


def read_object(path: Path) -> Mapping[str, object]:
    """The JSON object in `path`. Raises CheckpointError: no such file, no JSON, no object, or a key given twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
    return parse_object(text, path)


def parse_object(text: str, path: str | Path) -> Mapping[str, object]:
    """The JSON object in `text`, which came from `path`. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in found if names.count(name) > 1)
            raise CheckpointError(path, f"{repeated} is given twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


class Fields:
    """One JSON object read field by field. `prefix` is its place in the file, used in messages."""

    def __init__(self, values: Mapping[str, object], path: str | Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix

    def fail(self, name: str, detail: str) -> CheckpointError:
        """The error to raise for field `name`."""
        return CheckpointError(self._path, f"{self._prefix}{name} {detail}")

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def section(self, name: str) -> Fields:
        value = self._get(name)
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, got {value!r}")
        return Fields(value, self._path, f"{self._prefix}{name}.")

    def string(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self.fail(name, f"must be a string, got {value!r}")
        return value

    def strings(self, name: str) -> Mapping[str, str]:
        """An object whose values are strings."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, got {value!r}")
        for key, item in value.items():
            if not isinstance(item, str):
                raise self.fail(f"{name}.{key}", f"must be a string, got {item!r}")
        return value

    def integer(self, name: str, *, minimum: int = 1, below: int | None = None) -> int:
        return self._integer(name, self._get(name), minimum, below)

    def integers(self, name: str, *, minimum: int = 0, below: int | None = None) -> tuple[int, ...]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.fail(name, f"must be a list of integers, got {value!r}")
        return tuple(self._integer(f"{name}[{i}]", item, minimum, below) for i, item in enumerate(value))

    def ascending(self, name: str, *, below: int) -> tuple[int, ...]:
        """A list of layer ids: strictly ascending, each in [0, below)."""
        ids = self.integers(name, below=below)
        if any(a >= b for a, b in pairwise(ids)):
            raise self.fail(name, f"must be strictly ascending, got {list(ids)}")
        return ids

    def number(self, name: str, *, minimum: float = 0.0) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.fail(name, f"must be a finite number, got {value!r}")
        if value < minimum:
            raise self.fail(name, f"must be at least {minimum}, got {value!r}")
        return float(value)

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value == 0:
            raise self.fail(name, "must be greater than 0, got 0")
        return value

    def constant(self, name: str, want: object, *, default: object = None) -> None:
        """Refuse any value but `want`; a missing field counts as `default` where there is one."""
        value = default if default is not None and not self.has(name) else self._get(name)
        same_type = isinstance(value, bool) == isinstance(want, bool)
        if not same_type or value != want:
            raise self.fail(name, f"must be {want!r}, got {value!r}")

    def _get(self, name: str) -> object:
        if not self.has(name):
            raise self.fail(name, "is missing")
        return self._values[name]

    def _integer(self, name: str, value: object, minimum: int, below: int | None) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"must be an integer, got {value!r}")
        if value < minimum:
            raise self.fail(name, f"must be at least {minimum}, got {value}")
        if below is not None and value >= below:
            raise self.fail(name, f"must be below {below}, got {value}")
        return value
