"""NATS, a mock rank, a scheduler that knows no other, and a gateway: real processes, the scheduler apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.announcer import Announcer
from shoal_common.presence import Presence

from support.fake_scheduler import FakeScheduler, placed, serving
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process

MODEL_DIR = Path(__file__).parents[1] / "golden" / "data" / "tiny"


@dataclass(frozen=True, slots=True)
class GatewayMesh:
    """Where everything is."""

    http: str
    grpc: str
    gateway: ServiceProcess
    rank: ServiceProcess
    scheduler: FakeScheduler
    nats: NatsServer

    @property
    def url(self) -> str:
        """Base of the OpenAI client."""
        return f"http://{self.http}/v1"


@contextlib.contextmanager
def gateway_mesh(
    folder: Path, *, rank: Mapping[str, str] | None = None, gateway: Mapping[str, str] | None = None
) -> Iterator[GatewayMesh]:
    """Up and ready inside the block; ended after it."""
    nats = NatsServer(folder / "nats")
    nats.start()
    shared = {"SHOAL_NATS_URL": nats.url, "SHOAL_MESH": "test"}
    rank_env = {
        "SHOAL_MOCK_RANK_VOCAB_SIZE": "300",
        "SHOAL_MOCK_RANK_LOWEST_TOKEN_ID": "10",
        "SHOAL_MOCK_RANK_MAX_CONTEXT": "4096",
        **shared,
        **(rank or {}),
    }
    gateway_env = {
        "SHOAL_GATEWAY_HTTP_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_LISTEN_ADDRESS": "127.0.0.1:0",
        "SHOAL_GATEWAY_MODEL_DIR": str(MODEL_DIR),
        **shared,
        **(gateway or {}),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(nats.stop)
        ranked = stack.enter_context(
            service_process("shoal_decode_worker.mock_rank", log=folder / "rank.log", environment=rank_env)
        )
        scheduler = stack.enter_context(_scheduler(nats.url, ranked.address))
        served = stack.enter_context(
            service_process("shoal_gateway", log=folder / "gateway.log", environment=gateway_env)
        )
        http = served.ready["http"]
        _wait_ready(http, folder / "gateway.log")
        yield GatewayMesh(http, served.address, served, ranked, scheduler, nats)
