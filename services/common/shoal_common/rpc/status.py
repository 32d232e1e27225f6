"""MeshError to gRPC status with google.rpc details, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from shoal_common import errors
from shoal_common.errors import FieldViolation, MeshError

DETAILS_KEY = "grpc-status-details-bin"
_NANOS = 1_000_000_000
_CALLERS_KEY = "api_key"
"""Whose limit is reached: that of the key that the caller showed."""


def to_status(error: MeshError) -> status_pb2.Status:
    """Status with ErrorInfo, and RetryInfo, QuotaFailure or BadRequest where the error has such."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.ERROR_DOMAIN, metadata=error.metadata)
    ]
    if error.retry_after_s is not None:
        nanos = round(error.retry_after_s * _NANOS)
        delay = Duration(seconds=nanos // _NANOS, nanos=nanos % _NANOS)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, errors.QuotaExceeded):
        quota = error_details_pb2.QuotaFailure.Violation(subject=_CALLERS_KEY, description=error.message)
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=one.field, description=one.description)
            for one in error.violations
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def trailing_metadata(error: MeshError) -> tuple[tuple[str, bytes], ...]:
    """The metadata by which a status travels with its details."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def from_status(status: status_pb2.Status) -> MeshError:
    """The error that `to_status` was given; without ErrorInfo of ours, one of the class of its code."""
    reason, metadata, retry_after_s = "", {}, None
    violations: tuple[FieldViolation, ...] = ()
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == errors.ERROR_DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / _NANOS
        elif detail.Unpack(bad):
            violations = tuple(FieldViolation(one.field, one.description) for one in bad.field_violations)
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    error = errors.class_for(code, reason)(
        status.message, reason=reason or None, retry_after_s=retry_after_s, violations=violations
    )
    error.metadata = metadata
    return error


def from_rpc_error(error: grpc.RpcError) -> MeshError:
    """The MeshError behind a failed call of a sync or an aio stub."""
    code: grpc.StatusCode = error.code()
    details = _details(error)
    if details is not None:
        try:
            return from_status(status_pb2.Status.FromString(details))
        except DecodeError:
            pass  # some proxy's metadata; the plain code still says enough
    return errors.class_for(code.name, "")(error.details() or code.name)


def has_error_info(error: grpc.RpcError) -> bool:
    """True if a server of ours made this status, false if the transport or a proxy did."""
    return _details(error) is not None


def _details(error: grpc.RpcError) -> bytes | None:
    # The stubs type an entry as a named tuple that cannot be unpacked.
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return None
