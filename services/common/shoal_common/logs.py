"""Logs as JSON lines: `logger.info("preempted", extra={"request_id": ..., "blocks": ...})`."""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from opentelemetry import trace

from shoal_common.request_scope import request_id

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_dumps = json.JSONEncoder(ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, event, the process's fields, ids of trace and request, extras."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            extras["traceback"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname, record.name, record.getMessage(), extras)

    def line(self, created_s: float, level: str, logger: str, event: str, extras: Mapping[str, object]) -> str:
        """The same of its parts."""
        second, part = divmod(created_s, 1)
        line: dict[str, object] = {
            "time": f"{_second(int(second))}.{int(part * 1000):03d}Z",
            "level": level,
            "logger": logger,
            "event": event,
            **self._fields,
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"], line["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        if own := request_id.get():
            line["request_id"] = own
        line.update(extras)
        return _dumps(line)


@functools.lru_cache(maxsize=1)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


class _Lines(logging.StreamHandler[TextIO]):
    """Where the process's log goes."""

    def __init__(self, stream: TextIO, formatter: JsonFormatter) -> None:
        super().__init__(stream)
        self.lines = formatter
        self.setFormatter(formatter)

    def write(self, logger: str, event: str, extras: Mapping[str, object]) -> None:
        """At INFO, without a record."""
        try:
            line = self.lines.line(time.time(), "INFO", logger, event, extras)
            self.acquire()
            try:
                self.stream.write(line + self.terminator)
                self.flush()
            finally:
                self.release()
        except Exception:
            # As of a record: what cannot be told ends nothing.
            self.handleError(logging.makeLogRecord({"name": logger, "msg": event}))


def tell(logger: logging.Logger, event: str, extras: Mapping[str, object]) -> None:
    """As `logger.info(event, extra=extras)`, for what is told of every request: a record costs more than the line."""
    if not logger.isEnabledFor(logging.INFO):
        return
    handlers = logging.root.handlers
    if len(handlers) == 1 and isinstance(handlers[0], _Lines):
        handlers[0].write(logger.name, event, extras)
    else:
        logger.info(event, extra=extras)


def configure(*, service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (standard error if None). Replaces what was configured before."""
    formatter = JsonFormatter({"service": service, "instance": instance})
    handler = _Lines(stream if stream is not None else sys.stderr, formatter)
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
