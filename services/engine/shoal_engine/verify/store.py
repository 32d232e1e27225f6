"""Cost tables on disk: a worker that starts again on the same machine need not measure again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal_engine.verify.cost import MOST_COUNT, MOST_SECONDS, CostTable
from shoal_engine.verify.small_files import (
    BadFile,
    member,
    number,
    numbers,
    parse_json,
    read_small,
    replace_file,
    whole,
)

logger = logging.getLogger(__name__)

FORMAT = "shoal step costs 1"
_LATEST_S = 1e12


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """A table, and when it was measured: seconds since 1970."""

    table: CostTable
    measured_at_s: float


class CostStore:
    """Tables by key, one file each, in a folder that several workers may share.

    Whatever is wrong with a file, or with the folder, costs a measurement and a line in the log, never a start.
    """

    def __init__(self, directory: Path, *, ttl_s: float) -> None:
        """`ttl_s`: tables older than this are measured again."""
        self._directory = directory
        self._ttl_s = ttl_s

    def load(self, key: Mapping[str, str], *, now_s: float) -> StoredCosts | None:
        """The table of exactly this key; None where there is none that can be used."""
        path = self._path(key)
        try:
            stored = _stored(parse_json(read_small(path)), dict(key))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("cost table ignored", extra={"path": str(path), "error": str(error)})
            return None
        age_s = now_s - stored.measured_at_s
        if not 0 <= age_s <= self._ttl_s:
            logger.info("cost table is too old", extra={"path": str(path), "age_s": round(age_s)})
            return None
        return stored

    def save(self, key: Mapping[str, str], table: CostTable, *, now_s: float) -> None:
        """Replace the table of a key, in one move."""
        values = {"format": FORMAT, "key": dict(key), "measured_at_s": now_s, "table": asdict(table)}
        path = self._path(key)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(values, indent=1))
        except OSError as error:
            logger.warning("cost table not kept", extra={"path": str(path), "error": str(error)})

    def _path(self, key: Mapping[str, str]) -> Path:
        name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._directory / f"costs-{name[:32]}.json"


def _stored(values: object, key: dict[str, str]) -> StoredCosts:
    """Raises BadFile, or what a `CostTable` raises, for anything else than what `save` wrote under this key."""
    if member(values, "format") != FORMAT or member(values, "key") != key:
        raise BadFile("is of another format or key")
    table = member(values, "table")
    is_staircase = member(table, "is_staircase")
    if not isinstance(is_staircase, bool):
        raise BadFile("does not say whether it is a staircase")
    return StoredCosts(
        CostTable(
            rows=_counts(member(table, "rows")),
            step_s=numbers(member(table, "step_s"), 0.0, MOST_SECONDS),
            choices=_counts(member(table, "choices")),
            sampler_s=numbers(member(table, "sampler_s"), 0.0, MOST_SECONDS),
            draft_s=numbers(member(table, "draft_s"), 0.0, MOST_SECONDS),
            is_staircase=is_staircase,
        ),
        number(member(values, "measured_at_s"), 0.0, _LATEST_S),
    )


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadFile("has no list of counts")
    return tuple(whole(one, 1, MOST_COUNT) for one in value)
