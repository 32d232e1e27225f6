"""Which request the current task works for: put into logs, and into the metadata of outgoing calls."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID_KEY = "x-shoal-request-id"
"""Metadata key inside the mesh. The edge strips it from what comes from outside."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the running task serves; empty outside of one."""
