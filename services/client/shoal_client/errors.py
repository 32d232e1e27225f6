"""Failures of a call, by canonical code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from shoal.common.v1.status_pb2 import RpcErrorInfo, RpcRetryInfo, RpcStatus

_DETAILS_KEY = "grpc-status-details-bin"


class ShoalError(Exception):
    """A call failed.

    code           canonical gRPC code name, e.g. "NOT_FOUND"
    reason         stable UPPER_SNAKE name to branch on; empty if the connection failed before a server answered
    metadata       the numbers of the message
    retry_after_s  seconds after which a retry may work; None if the server does not say
    """

    def __init__(
        self, message: str, *, code: str, reason: str, metadata: Mapping[str, str], retry_after_s: float | None
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.reason = message, code, reason
        self.metadata, self.retry_after_s = metadata, retry_after_s


class InvalidRequest(ShoalError):
    """The request is wrong; trying again does not help."""


class ModelNotFound(ShoalError):
    """No such model."""


class NotAllowed(ShoalError):
    """The API key is missing, unknown, or may not do this."""


class LimitReached(ShoalError):
    """A quota is used up, or the stream was not read."""


class Unavailable(ShoalError):
    """No server or no capacity now; try again after `retry_after_s`."""


class DeadlineExceeded(ShoalError):
    """The answer did not come in time."""


class Cancelled(ShoalError):
    """The call was given up on this side."""


_BY_CODE: Mapping[str, type[ShoalError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNAUTHENTICATED": NotAllowed,
    "PERMISSION_DENIED": NotAllowed,
    "RESOURCE_EXHAUSTED": LimitReached,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}


def from_rpc_error(error: grpc.RpcError) -> ShoalError:
    """The typed error behind a failed call of a sync or an aio stub."""
    code: str = error.code().name
    info, retry = RpcErrorInfo(), RpcRetryInfo()
    has_retry = False
    for detail in _details(error):
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            info.ParseFromString(detail.value)
        elif detail.type_url.endswith("/google.rpc.RetryInfo"):
            retry.ParseFromString(detail.value)
            has_retry = True
    delay = retry.retry_delay
    return _BY_CODE.get(code, ShoalError)(
        error.details() or code,
        code=code,
        reason=info.reason,
        metadata=dict(info.metadata),
        retry_after_s=delay.seconds + delay.nanos / 1e9 if has_retry else None,
    )


def _details(error: grpc.RpcError) -> Iterable[AnyMessage]:
    # The stubs type an entry as a named tuple that cannot be unpacked.
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return RpcStatus.FromString(value).details
            except DecodeError:
                return ()
    return ()
