"""What can go wrong with a disk, by name."""

from __future__ import annotations

import errno

from shoal_common.errors import DeadlineExceeded, MeshError, NotFound, ResourceExhausted, Unavailable


class SsdUnavailable(Unavailable):
    """The disk answered with an error."""

    reason = "SSD_UNAVAILABLE"


class SsdReadOnly(SsdUnavailable):
    """The disk takes no writes; what it has can be read."""

    reason = "SSD_READ_ONLY"


class SsdFull(ResourceExhausted):
    """The disk, or our share of it, is full until something is removed and compacted."""

    reason = "SSD_FULL"


class SsdBusy(ResourceExhausted):
    """The queue to the disk is full."""

    reason = "SSD_BUSY"


class SsdTimeout(DeadlineExceeded):
    """The disk did not answer in time. A write may still come to be; it is undone when it does."""

    reason = "SSD_TIMEOUT"


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def from_os(error: OSError, doing: str) -> MeshError:
    """The typed form of what the operating system said while `doing`."""
    name = errno.errorcode.get(error.errno or 0, "unknown")
    message = f"{doing}: {error.strerror or error} ({name})"
    if error.errno in _FULL:
        return SsdFull(message, errno=name)
    if error.errno in _READ_ONLY:
        return SsdReadOnly(message, errno=name)
    if error.errno == errno.ENOENT:
        return NotFound(message, errno=name)
    return SsdUnavailable(message, errno=name)
