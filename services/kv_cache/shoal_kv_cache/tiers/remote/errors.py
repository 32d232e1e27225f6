"""What can go wrong with a store outside of the mesh, by name."""

from __future__ import annotations

from shoal_common.errors import DeadlineExceeded, ResourceExhausted, Unavailable


class RemoteUnavailable(Unavailable):
    """The store is gone or answered with an error."""

    reason = "REMOTE_UNAVAILABLE"


class RemoteResting(RemoteUnavailable):
    """The store failed several times and is not asked for a while."""

    reason = "REMOTE_RESTING"


class RemoteTimeout(DeadlineExceeded):
    """The store did not answer in time."""

    reason = "REMOTE_TIMEOUT"


class RemoteFull(ResourceExhausted):
    """The store has no room."""

    reason = "REMOTE_FULL"


class RemoteBusy(ResourceExhausted):
    """Too much is on its way to the store."""

    reason = "REMOTE_BUSY"
