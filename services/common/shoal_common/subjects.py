"""Names on the bus."""

from __future__ import annotations


def presence_bucket(mesh: str) -> str:
    """The KV bucket of live instances."""
    return f"shoal_{mesh}_presence"


def load(mesh: str, role: str, instance: str) -> str:
    """Load reports of one instance; `*` as role or instance for all."""
    return f"shoal.{mesh}.v1.load.{role}.{instance}"


def kv_events(mesh: str, instance: str) -> str:
    """Blocks and snapshots stored, removed, cleared by one kv_cache instance; `*` for all."""
    return f"shoal.{mesh}.v1.kv.{instance}"


def control(mesh: str, instance: str) -> str:
    """Requests to one instance: drain, resume, log level, profile."""
    return f"shoal.{mesh}.v1.control.{instance}"
