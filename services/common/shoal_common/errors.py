"""Expected failures. Each has a canonical gRPC code, a stable UPPER_SNAKE reason and the numbers of its message.

No gRPC here: cores raise these, `shoal_common.rpc` turns them into a status and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

ERROR_DOMAIN = "shoal"
"""Domain of every google.rpc.ErrorInfo that Shoal sends."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path in the message and what is wrong with it."""

    field: str
    description: str


class MeshError(Exception):
    """An expected failure; subclasses say which. Keyword arguments are its metadata: every number in the message.

    code             canonical gRPC code name, e.g. "NOT_FOUND"
    reason           stable UPPER_SNAKE name that callers may branch on
    retry_after_s    seconds after which a retry may work; None if nothing is known
    violations       which fields of the request are wrong
    """

    code: ClassVar[str] = "INTERNAL"
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.retry_after_s = retry_after_s
        self.violations = violations
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(MeshError):
    """The request is wrong whatever the state of the mesh."""

    code, reason = "INVALID_ARGUMENT", "INVALID_ARGUMENT"

    @classmethod
    def at(cls, field: str, description: str, *, reason: str | None = None) -> InvalidArgument:
        """One wrong field: `field` is its path in the request, e.g. "generation.sampling.top_p"."""
        violation = FieldViolation(field, description)
        return cls(f"{field}: {description}", reason=reason, violations=(violation,), field=field)


class OutOfRange(MeshError):
    """A position past the end of what exists."""

    code, reason = "OUT_OF_RANGE", "OUT_OF_RANGE"


class NotFound(MeshError):
    """What the request names does not exist."""

    code, reason = "NOT_FOUND", "NOT_FOUND"


class AlreadyExists(MeshError):
    """What the request would create exists with other content."""

    code, reason = "ALREADY_EXISTS", "ALREADY_EXISTS"


class Unauthenticated(MeshError):
    """No valid credentials."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(MeshError):
    """Valid credentials that do not allow this."""

    code, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class ResourceExhausted(MeshError):
    """A limit is reached."""

    code, reason = "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"


class OutOfCapacity(ResourceExhausted):
    """We have no room for this now; another instance may have."""

    reason = "OUT_OF_CAPACITY"


class QuotaExceeded(ResourceExhausted):
    """The caller's own limit is reached."""

    reason = "QUOTA_EXCEEDED"


class SlowReader(ResourceExhausted):
    """The caller does not read what it asked for."""

    reason = "SLOW_READER"


class FailedPrecondition(MeshError):
    """The state does not allow this until someone changes it."""

    code, reason = "FAILED_PRECONDITION", "FAILED_PRECONDITION"


class NumericsMismatch(FailedPrecondition):
    """Caller and callee compute different bits."""

    reason = "NUMERICS_MISMATCH"


class Aborted(MeshError):
    """Given up for another request's sake; the whole sequence of calls may be tried again."""

    code, reason = "ABORTED", "ABORTED"


class Moved(Aborted):
    """The running request must go on elsewhere."""

    reason = "MOVED"


class Superseded(Aborted):
    """A newer attempt of the same request exists."""

    reason = "SUPERSEDED"


class Unavailable(MeshError):
    """Not now; the same call may work later or elsewhere."""

    code, reason = "UNAVAILABLE", "UNAVAILABLE"


class Draining(Unavailable):
    """The instance is leaving and takes no new work."""

    reason = "DRAINING"


class DeadlineExceeded(MeshError):
    """The time given was not enough."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class DataLoss(MeshError):
    """Data is damaged beyond use."""

    code, reason = "DATA_LOSS", "DATA_LOSS"


class ChecksumMismatch(DataLoss):
    """Bytes differ from what their sender meant."""

    reason = "CHECKSUM_MISMATCH"


class Unimplemented(MeshError):
    """This build or setup cannot do this."""

    code, reason = "UNIMPLEMENTED", "UNIMPLEMENTED"


class Cancelled(MeshError):
    """The caller gave up."""

    code, reason = "CANCELLED", "CANCELLED"


class Unknown(MeshError):
    """A peer or the transport failed without saying how."""

    code, reason = "UNKNOWN", "UNKNOWN"


class Internal(MeshError):
    """A bug on the other side; its log knows more."""

    code, reason = "INTERNAL", "INTERNAL"


_BY_CODE: Mapping[str, type[MeshError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        OutOfRange,
        NotFound,
        AlreadyExists,
        Unauthenticated,
        PermissionDenied,
        ResourceExhausted,
        FailedPrecondition,
        Aborted,
        Unavailable,
        DeadlineExceeded,
        DataLoss,
        Unimplemented,
        Cancelled,
        Unknown,
        Internal,
    )
}
_BY_REASON: Mapping[str, type[MeshError]] = {
    kind.reason: kind
    for kind in (
        OutOfCapacity,
        QuotaExceeded,
        SlowReader,
        NumericsMismatch,
        Moved,
        Superseded,
        Draining,
        ChecksumMismatch,
    )
}


def class_for(code: str, reason: str) -> type[MeshError]:
    """The class of an error received from elsewhere: by reason if it is one of ours, else by code, else Unknown."""
    kind = _BY_REASON.get(reason)
    if kind is not None and kind.code == code:
        return kind
    return _BY_CODE.get(code, Unknown)
