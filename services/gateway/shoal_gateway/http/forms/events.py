"""Server-sent events that have a name. Pure."""

from __future__ import annotations


def event(name: str, data: str) -> bytes:
    """One event; `data` is JSON on one line."""
    return f"event: {name}\ndata: {data}\n\n".encode()
