"""Logs as JSON lines: `logger.info("preempted", extra={"request_id": ..., "blocks": ...})`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from opentelemetry import trace

from shoal_common.request_scope import request_id

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_dumps = json.JSONEncoder(ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, event, the process's fields, ids of trace and request, extras."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **self._fields,
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"], line["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        if own := request_id.get():
            line["request_id"] = own
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[key] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _dumps(line)


def configure(*, service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (standard error if None). Replaces what was configured before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter({"service": service, "instance": instance}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Who logged from which line of which thread is not told, so it need not be found out for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of this process. Raises ValueError for a name that is not one of LEVELS."""
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    logging.getLogger().setLevel(level)
    # These log every frame and every retry at their own INFO and DEBUG.
    for noisy in ("nats", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
