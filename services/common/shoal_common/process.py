"""What the `main` of every service begins with."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop
from opentelemetry.sdk.trace import TracerProvider

from shoal_common import detached, logs
from shoal_common.settings import Loaded
from shoal_common.telemetry import Metrics, configure_tracing

logger = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000
_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class Process:
    """Identity and telemetry of the running process."""

    service: str
    instance_id: str
    metrics: Metrics
    tracing: TracerProvider


def new_instance_id(service: str) -> str:
    """An id no other process start has: `decode_worker-5f3a...`. Valid as a NATS subject token and a KV key."""
    return f"{service}-{secrets.token_hex(8)}"


def begin(service: str, loaded: Loaded[Any]) -> Process:
    """Set up logs, traces and metrics, and log the settings in force with their hash. Call once, at the start."""
    instance_id = new_instance_id(service)
    logs.configure(service=service, instance=instance_id, level=loaded.shared.log_level)
    tracing = configure_tracing(service=service, instance=instance_id, otlp_endpoint=loaded.shared.otlp_endpoint)
    metrics = Metrics()
    metrics.info("config", "Settings in force", {"service": service, "hash": loaded.config_hash})
    logger.info("settings", extra={"settings": dict(loaded.effective), "config_hash": loaded.config_hash})
    return Process(service, instance_id, metrics, tracing)


def run(process: Process, main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on a uvloop until it ends, then flush the traces.

    Where a detached thread is still at work (a model loads), the process ends at once: native code cannot be told to
    stop, and the interpreter's own end beside it would abort.
    """
    status = 0
    # What start-up made lives as long as the process: collections need not walk it, nor come for every 700 objects. The
    # oldest generation must not wait for long: what failed with an error is a circle, and may hold buffers.
    gc.collect()
    gc.freeze()
    # A thread that steps a model gives way to the event loop sooner than after the default of 5 ms.
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_YOUNG_OBJECTS, 5, 5)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except SystemExit as leaving:
        if not detached.has_left_work():
            raise
        status = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        process.tracing.shutdown()
    if detached.has_left_work():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
