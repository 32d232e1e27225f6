"""Files of settings and measurements that anyone may have damaged: read in bounded time and memory, or refused."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

MOST_BYTES = 1 << 20


class BadFile(ValueError):
    """A file that does not hold what it should, in one line without its name."""


def open_regular(path: Path) -> int:
    """A descriptor to read from, without waiting for a writer. Raises OSError; BadFile for a folder or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile("is no file")
    return descriptor


def read_small(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """A file of at most so many bytes. Raises OSError, BadFile."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise BadFile(f"has more than {most_bytes} bytes")
    return data


def replace_file(path: Path, text: str) -> None:
    """Write a file in one move: who reads it meanwhile has the old one or the new one. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def parse_json(data: bytes | str) -> object:
    """Raises BadFile for anything but one JSON value, also for one that no program should have written."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"is no JSON: {error}") from error
    return value


def member(values: object, name: str) -> object:
    """A member of a JSON object. Raises BadFile."""
    if not isinstance(values, dict) or name not in values:
        raise BadFile(f"has no {name}")
    return values[name]


def whole(value: object, least: int, most: int) -> int:
    """A JSON number without a fraction, within bounds. Raises BadFile."""
    if type(value) is not int or not least <= value <= most:
        raise BadFile(f"has {_short(value)} where a whole number in [{least}, {most}] is wanted")
    return value


def number(value: object, least: float, most: float) -> float:
    """A JSON number within bounds. Raises BadFile."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise BadFile(f"has {_short(value)} where a number in [{least:g}, {most:g}] is wanted")
    return float(value)  # type: ignore[arg-type]


def numbers(value: object, least: float, most: float) -> tuple[float, ...]:
    """A JSON array of such numbers. Raises BadFile."""
    if not isinstance(value, list):
        raise BadFile(f"has {_short(value)} where a list is wanted")
    return tuple(number(one, least, most) for one in value)


def _short(value: object) -> str:
    if isinstance(value, int | float | bool) or value is None:
        return repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return f"a {type(value).__name__}"
