"""InvalidArgument for one field, with the numbers of its message as metadata."""

from __future__ import annotations

from shoal_common.errors import InvalidArgument


def wrong_field(field: str, description: str, *, reason: str | None = None, **metadata: object) -> InvalidArgument:
    """The error to raise: `field` is the path in the request, e.g. "params.top_p"."""
    error = InvalidArgument.at(field, description, reason=reason)
    error.metadata = {**error.metadata, **{key: str(value) for key, value in metadata.items()}}
    return error
