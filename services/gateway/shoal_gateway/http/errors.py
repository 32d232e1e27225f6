"""How failures look over HTTP: OpenAI's error object, a stable code, a truthful Retry-After."""

from __future__ import annotations

import math

import orjson
from shoal_common.errors import MeshError, OutOfCapacity, QuotaExceeded, SlowReader

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


def status_of(error: MeshError) -> int:
    """The HTTP status. 429 is the caller's own limit, 503 is our capacity."""
    for kind, status in _BY_CLASS:
        if isinstance(error, kind):
            return status
    return _STATUS.get(error.code, INTERNAL_STATUS)


def error_body(error: MeshError) -> bytes:
    """{"error": {"message", "type", "param", "code"}}; the code is the error's reason in lower case."""
    status = status_of(error)
    kind = _TYPES.get(status, "server_error" if status >= INTERNAL_STATUS else "invalid_request_error")
    message = error.message if status != INTERNAL_STATUS else "internal error; the server's log has the details"
    param = error.violations[0].field if error.violations else None
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}})


def error_headers(error: MeshError) -> list[tuple[bytes, bytes]]:
    """Content type, and Retry-After in whole seconds where a retry may help."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, BodyTooLarge | SlowWriter):
        # The rest of the body is not worth reading.
        headers.append((b"connection", b"close"))
    return headers
