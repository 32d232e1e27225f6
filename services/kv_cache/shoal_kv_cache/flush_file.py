"""The log of flushes on disk, beside what it is about."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.core.flush_log import FlushLog, FlushRecord
from shoal_kv_cache.tiers.ssd.errors import from_os

logger = logging.getLogger(__name__)

_FILE = "flushes"
_LOST = "unreadable log"


class FlushFile:
    """One small file, replaced as a whole: a kill leaves the one before or the one after."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE

    def read(self) -> FlushLog:
        """What is kept. A file that cannot be read may have held anything: then everything is to be flushed."""
        try:
            raw = self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return FlushLog()
        except (OSError, UnicodeDecodeError) as error:
            return self._lost(error)
        try:
            header, *lines = [json.loads(line) for line in raw.splitlines()]
            return FlushLog(
                [_record(one) for one in lines],
                forgotten=[bytes.fromhex(one) for one in header["forgotten"]],
                has_forgotten=bool(header["has_forgotten"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._lost(error)

    def write(self, records: Sequence[FlushRecord], *, forgotten: Sequence[bytes], has_forgotten: bool) -> None:
        """Durable on return. Blocking. Raises MeshError of the disk tier."""
        header = {"has_forgotten": has_forgotten, "forgotten": [name.hex() for name in forgotten]}
        lines = [json.dumps(one) for one in (header, *map(_fields, records))]
        partial = self._path.with_suffix(".new")
        try:
            with partial.open("w", encoding="ascii") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise from_os(error, f"writing {self._path}") from error

    def _lost(self, error: Exception) -> FlushLog:
        logger.warning(
            "the log of flushes cannot be read: all is dropped", extra={"path": str(self._path), "error": str(error)}
        )
        return FlushLog([FlushRecord(_LOST, Filter())], has_forgotten=True)


def _fields(one: FlushRecord) -> dict[str, object]:
    tag = None if one.what.tenant_tag is None else one.what.tenant_tag.hex()
    return {"flush_id": one.flush_id, "kv_id": one.what.kv_id, "tenant_tag": tag, "is_done": one.is_done}


def _record(fields: dict[str, object]) -> FlushRecord:
    kv_id, tag = fields["kv_id"], fields["tenant_tag"]
    return FlushRecord(
        str(fields["flush_id"]),
        Filter(
            kv_id=None if kv_id is None else str(kv_id), tenant_tag=None if tag is None else bytes.fromhex(str(tag))
        ),
        is_done=bool(fields["is_done"]),
    )
