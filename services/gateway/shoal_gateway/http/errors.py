"""How failures look over HTTP: the error object of each API, a stable code, a truthful Retry-After."""

from __future__ import annotations

import math
from typing import Any

import orjson
from shoal_common import request_scope
from shoal_common.errors import MeshError, OutOfCapacity, QuotaExceeded, SlowReader, Unauthenticated

from shoal_gateway.refusals import BodyTooLarge, MethodNotAllowed, SlowWriter

INTERNAL_STATUS = 500
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "ABORTED": 503,
    "FAILED_PRECONDITION": 503,
    "RESOURCE_EXHAUSTED": 503,
    "DEADLINE_EXCEEDED": 504,
}
_BY_CLASS: tuple[tuple[type[MeshError], int], ...] = (
    (BodyTooLarge, 413),
    (QuotaExceeded, 429),
    (SlowReader, 408),
    (SlowWriter, 408),
    (MethodNotAllowed, 405),
    (OutOfCapacity, 503),
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_ENDS = ("/messages", "/messages/count_tokens")


def status_of(error: MeshError) -> int:
    """The HTTP status. 429 is the caller's own limit, 503 is our capacity."""
    for kind, status in _BY_CLASS:
        if isinstance(error, kind):
            return status
    return _STATUS.get(error.code, INTERNAL_STATUS)


def error_body(error: MeshError, path: str) -> bytes:
    """The error object of the API that is served at `path`."""
    return orjson.dumps(anthropic_error(error) if is_anthropic(path) else openai_error(error))


def is_anthropic(path: str) -> bool:
    """Anthropic's API is served there."""
    return path.endswith(_ANTHROPIC_ENDS)


def openai_error(error: MeshError) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; the code is the error's reason in lower case."""
    status = status_of(error)
    kind = _TYPES.get(status, "server_error" if status >= INTERNAL_STATUS else "invalid_request_error")
    told = {"message": _told(error, status), "type": kind, "param": _field(error), "code": error.reason.lower()}
    return {"error": told}


def anthropic_error(error: MeshError) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message", "param", "code"}, "request_id"}; the last two are extensions."""
    status = status_of(error)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= INTERNAL_STATUS else "invalid_request_error")
    told = {"type": kind, "message": _told(error, status), "param": _field(error), "code": error.reason.lower()}
    return {"type": "error", "error": told, "request_id": request_scope.request_id.get() or None}


def _told(error: MeshError, status: int) -> str:
    return error.message if status != INTERNAL_STATUS else "internal error; the server's log has the details"


def _field(error: MeshError) -> str | None:
    return error.violations[0].field if error.violations else None


def error_headers(error: MeshError) -> list[tuple[bytes, bytes]]:
    """Content type, Retry-After in whole seconds where a retry may help, and what the status asks for beside."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, QuotaExceeded) and error.retry_after_s is None:
        # No waiting helps. The clients of OpenAI and Anthropic would try again otherwise.
        headers.append((b"x-should-retry", b"false"))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.metadata["allow"].encode()))
    if isinstance(error, BodyTooLarge | SlowWriter):
        # The rest of the body is not worth reading.
        headers.append((b"connection", b"close"))
    return headers
