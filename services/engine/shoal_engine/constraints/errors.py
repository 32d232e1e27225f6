"""How a constraint fails a request, and no other one."""

from __future__ import annotations

from shoal_common.errors import InvalidArgument, OutOfCapacity


class ConstraintTimeout(InvalidArgument):
    """The constraint was not compiled in time. The client can only make it simpler: no other worker is faster."""

    reason = "CONSTRAINT_TIMEOUT"


class ConstraintFailed(InvalidArgument):
    """A running constraint exceeds what one token may cost, or allows no token."""

    reason = "CONSTRAINT_FAILED"


class CompilerBusy(OutOfCapacity):
    """As many constraints wait to be compiled as are kept."""

    reason = "QUEUE_FULL"
