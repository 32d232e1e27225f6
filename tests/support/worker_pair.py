"""A decode worker, a prefill worker and a kv_cache node, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal.kv_cache.v1 import kv_cache_service_pb2 as cache_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2_grpc as cache_rpc
from support.nats_server import free_port
from support.service_process import ServiceProcess, service_process
from support.waiting import until_async

TINY = Path(__file__).resolve().parents[1] / "golden" / "data" / "tiny"
VOCAB_SIZE = 512
TIMEOUT_S = 60.0


class PairNode:
    """A kv_cache node that keeps its address over its lives, and its disk over those that have one."""

    def __init__(self, folder: Path) -> None:
        self.address, self.disk = f"127.0.0.1:{free_port()}", folder / "disk"
        self._logs = (folder / f"kv_cache-{number}.log" for number in itertools.count())
        self._lives = contextlib.ExitStack()
        self.start()

    def start(self, *, has_disk: bool = False) -> None:
        """Start it, again if it was killed."""
        environment = {"SHOAL_KV_CACHE_LISTEN_ADDRESS": self.address}
        if has_disk:
            environment |= {
                "SHOAL_KV_CACHE_SSD_DIRECTORY": str(self.disk),
                "SHOAL_KV_CACHE_SSD_BYTES": str(64 << 20),
                "SHOAL_KV_CACHE_SSD_SEGMENT_FILE_BYTES": str(1 << 20),
            }
        context = service_process("shoal_kv_cache", log=next(self._logs), environment=environment)
        self.process = self._lives.enter_context(context)

    def restart(self, *, has_disk: bool = False) -> None:
        """kill -9, and start it."""
        self.kill()
        self.start(has_disk=has_disk)

    def kill(self) -> None:
        """kill -9."""
        self.process.popen.kill()
        self.process.popen.wait()

    def __enter__(self) -> PairNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._lives.close()


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Three running processes."""

    decode: ServiceProcess
    prefill: ServiceProcess
    node: PairNode
    logs: Path

    @property
    def kv_cache(self) -> ServiceProcess:
        """The node as it runs now."""
        return self.node.process

    @property
    def target(self) -> pb.PrefillTarget:
        """The prefill worker, as a placement names it."""
        return pb.PrefillTarget(instance_id="prefill", address=self.prefill.address)


def wait_until_ready(process: ServiceProcess, *, timeout_s: float) -> None:
    """Wait for /readyz."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://{process.admin}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            if time.monotonic() > give_up or process.popen.poll() is not None:
                raise AssertionError(f"not ready in {timeout_s} s: {error.read()!r}") from error
        time.sleep(0.05)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Token ids without the special ones, the same for the same arguments."""
    state, ids = seed, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append(3 + (state >> 8) % (VOCAB_SIZE - 20))
    return ids


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens per choice and the end."""

    tokens: dict[int, list[int]]
    ended: pb.Ended

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the cache."""
        return self.ended.usage.cached_prompt_tokens


async def ask(
    pair: WorkerPair,
    prompt: list[int],
    *,
    root: bytes | None = None,
    targets: list[pb.PrefillTarget] | None = None,
    temperature: float = 0.0,
    max_tokens: int = 8,
    choices: list[pb.ChoiceState] | None = None,
    request_id: str = "",
    **more: Any,
) -> Answer:
    """One whole answer without a gateway. Raises AioRpcError."""
    request = pb.GenerateRequest(
        request_id=request_id or secrets.token_hex(8),
        attempt=1,
        prompt_ids=prompt,
        params=sampling_pb2.SamplingParams(temperature=temperature, seed=11, max_tokens=max_tokens, ignore_eos=True),
        cache_root=root,
        prefill_targets=targets or [],
        choices=choices or [],
        **more,
    )
    tokens: dict[int, list[int]] = {}
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        call: Any = rpc.DecodeServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        while isinstance(event := await call.read(), pb.GenerateResponse):
            for entry in event.entries.entries:
                tokens.setdefault(entry.choice_index, []).extend(entry.token_ids)
            if event.HasField("ended"):
                return Answer(tokens, event.ended)
    raise AssertionError("the call ended without an end")


async def numbers(process: ServiceProcess) -> dict[str, float]:
    """The figures of GetStatus."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub: Any = admin_rpc.AdminServiceStub(channel)
        return dict((await stub.GetStatus(admin.GetStatusRequest(), timeout=5)).numbers)


async def counted(process: ServiceProcess, name: str, **labels: str) -> float:
    """The sum of a counter of the process over all its label sets that hold `labels`."""
    url = f"http://{process.admin}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read())).decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((f"{name}_total ", f"{name}_total{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in wanted))


async def cache_stats(pair: WorkerPair) -> cache_pb.GetStatsResponse:
    """The counts of the kv_cache node."""
    async with grpc.aio.insecure_channel(pair.kv_cache.address) as channel:
        stub: Any = cache_rpc.KvCacheServiceStub(channel)
        stats: cache_pb.GetStatsResponse = await stub.GetStats(cache_pb.GetStatsRequest(), timeout=5)
        return stats


async def until_idle(pair: WorkerPair) -> None:
    """Wait until both workers hold nothing, and no lease is open."""

    async def is_idle() -> bool:
        decode, prefill = await numbers(pair.decode), await numbers(pair.prefill)
        leases = (await cache_stats(pair)).lease_count
        free = (decode["free_blocks"], decode["free_slots"], prefill["free_blocks"], prefill["free_slots"])
        rest = (decode["open_requests"], prefill["open_requests"], prefill["open_exports"], leases)
        seen[:] = [f"free {free}, open {rest}"]
        return free == (1024, 32, 512, 16) and not any(rest)

    seen: list[str] = []
    try:
        await until_async(is_idle, what="pools at their baseline")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen}") from error
