"""Cost tables on disk: a worker that starts again on the same machine need not measure again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal_engine.verify.cost import CostTable

logger = logging.getLogger(__name__)

FORMAT = "shoal step costs 1"


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
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT or values["key"] != dict(key):
                raise ValueError("is of another format or key")
            measured_at_s = float(values["measured_at_s"])
            stored = StoredCosts(_table(values["table"]), measured_at_s)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("cost table ignored", extra={"path": str(path), "error": str(error)})
            return None
        if not 0 <= now_s - measured_at_s <= self._ttl_s:
            logger.info("cost table is too old", extra={"path": str(path), "age_s": round(now_s - measured_at_s)})
            return None
        return stored

    def save(self, key: Mapping[str, str], table: CostTable, *, now_s: float) -> None:
        """Replace the table of a key, in one move."""
        values = {"format": FORMAT, "key": dict(key), "measured_at_s": now_s, "table": asdict(table)}
        path = self._path(key)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._directory, prefix=".costs-", delete=False
            ) as file:
                try:
                    file.write(json.dumps(values, indent=1))
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            logger.warning("cost table not kept", extra={"path": str(path), "error": str(error)})

    def _path(self, key: Mapping[str, str]) -> Path:
        name = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._directory / f"costs-{name[:32]}.json"


def _table(values: Mapping[str, Sequence[float]]) -> CostTable:
    return CostTable(
        rows=tuple(int(n) for n in values["rows"]),
        step_s=tuple(float(t) for t in values["step_s"]),
        choices=tuple(int(n) for n in values["choices"]),
        sampler_s=tuple(float(t) for t in values["sampler_s"]),
        draft_s=tuple(float(t) for t in values["draft_s"]),
        is_staircase=bool(values["is_staircase"]),
    )
