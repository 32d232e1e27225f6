"""What the gateway costs per token, against a server that does nothing but stream, in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from bench.gateway_load import Load
from bench.gateway_null import TOKENS
from bench.harness import Bar, finish
from shoal_gateway.served_model import packaged_model_dir
from support.gateway_mesh import GatewayMesh, gateway_mesh

ROUNDS = 3
WINDOW_S = 4.0
WARM_UP_S = 1.0
BODY: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Which way is it to the harbour, please? " * 4}],
    "thinking": {"type": "disabled"},
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
}
RANK = {
    # The vocabulary of the packaged model without single bytes and special tokens: every token is text of its own.
    "SHOAL_MOCK_RANK_VOCAB_SIZE": "3569",
    "SHOAL_MOCK_RANK_LOWEST_TOKEN_ID": "300",
    "SHOAL_MOCK_RANK_SLOT_COUNT": "2048",
    "SHOAL_MOCK_RANK_BLOCK_COUNT": "65536",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One server under load for a while. CPU in seconds, by process; the client's beside it."""

    tokens: int
    events: int
    wall_s: float
    cpu_s: Mapping[str, float]
    client_cpu_s: float

    @property
    def us_per_token(self) -> float:
        """CPU of all processes of the server per token."""
        return 1e6 * sum(self.cpu_s.values()) / self.tokens

    @property
    def us_per_token_with_client(self) -> float:
        """The same with the client's own."""
        return 1e6 * (sum(self.cpu_s.values()) + self.client_cpu_s) / self.tokens

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.wall_s


def cpu_s(pid: int) -> float:
    """User and system time of all threads of another process (its POSIX CPU clock)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def null_server(step_ms: float, step_tokens: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Address and process of a null server."""
    command = [sys.executable, "-m", "bench.gateway_null", "--step-ms", str(step_ms), "--step-tokens", str(step_tokens)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        port = json.loads(popen.stdout.readline())["port"]
        yield f"127.0.0.1:{port}", {"null": popen.pid}
    finally:
        popen.kill()
        popen.wait()


def processes(mesh: GatewayMesh) -> dict[str, int]:
    """Every process of the mesh."""
    named = {"gateway": mesh.gateway.popen.pid, "nats": mesh.nats.pid}
    named |= {f"rank{index}": rank.popen.pid for index, rank in enumerate(mesh.ranks)}
    return named | {f"scheduler{index}": one.popen.pid for index, one in enumerate(mesh.schedulers)}


async def window(address: str, pids: Mapping[str, int], streams: int) -> Window:
    """Load one server."""
    async with Load(address, BODY, streams) as load:
        await asyncio.sleep(WARM_UP_S)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        tally, own_s, began_s = load.reset(), time.process_time(), time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        return Window(
            tokens=tally.answers * TOKENS,
            events=tally.events,
            wall_s=time.perf_counter() - began_s,
            cpu_s={name: cpu_s(pid) - before[name] for name, pid in pids.items()},
            client_cpu_s=time.process_time() - own_s,
        )


async def pairs(
    null: tuple[str, Mapping[str, int]], mesh: tuple[str, Mapping[str, int]], streams: int
) -> list[tuple[Window, Window]]:
    """Both servers turn by turn."""
    return [(await window(*null, streams), await window(*mesh, streams)) for _ in range(ROUNDS)]


def figures(measured: Sequence[tuple[Window, Window]]) -> dict[str, Any]:
    """Medians of all rounds, and the ratios of each round."""

    def middle(of: Callable[[Window], float], side: int) -> float:
        return round(median(of(pair[side]) for pair in measured), 3)

    def ratio(of: Callable[[Window], float]) -> float:
        return round(median(of(mesh) / of(null) for null, mesh in measured), 3)

    names = measured[0][1].cpu_s
    return {
        "cpu_ratio": ratio(lambda one: one.us_per_token),
        "cpu_ratio_with_client": ratio(lambda one: one.us_per_token_with_client),
        "tokens_s_ratio": ratio(lambda one: one.tokens_s),
        "cpu_ratio_of_each_round": [round(mesh.us_per_token / null.us_per_token, 3) for null, mesh in measured],
        "null_cpu_us_per_token": middle(lambda one: one.us_per_token, 0),
        "mesh_cpu_us_per_token": middle(lambda one: one.us_per_token, 1),
        "mesh_cpu_us_per_token_by_process": {
            name: round(median(1e6 * mesh.cpu_s[name] / mesh.tokens for _, mesh in measured), 3) for name in names
        },
        "client_cpu_us_per_token": [middle(lambda one: 1e6 * one.client_cpu_s / one.tokens, side) for side in range(2)],
        "tokens_s": [middle(lambda one: one.tokens_s, side) for side in range(2)],
        "tokens_per_event": [middle(lambda one: one.tokens / one.events, side) for side in range(2)],
    }


@contextlib.contextmanager
def mesh_of(ms_per_token: float, step_tokens: int) -> Iterator[GatewayMesh]:
    """A mesh whose rank makes so many tokens a step."""
    rank = {
        **RANK,
        "SHOAL_MOCK_RANK_MS_PER_TOKEN": str(ms_per_token),
        "SHOAL_MOCK_RANK_TOKENS_PER_STEP": str(step_tokens),
    }
    gateway = {"SHOAL_GATEWAY_MODEL": str(packaged_model_dir())}
    with (
        tempfile.TemporaryDirectory() as folder,
        gateway_mesh(Path(folder), rank=rank, gateway=gateway, scheduler_count=1) as mesh,
    ):
        yield mesh


def measure_cost(ms_per_token: float, step_tokens: int, streams: Sequence[int]) -> list[dict[str, Any]]:
    """Both servers at one pace, per number of streams."""
    with (
        mesh_of(ms_per_token, step_tokens) as mesh,
        null_server(ms_per_token * step_tokens, step_tokens) as null,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return [figures(runner.run(pairs(null, (mesh.http, processes(mesh)), count))) for count in streams]


def main() -> int:
    """All cases, or those named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=["paced", "four", "unpaced"])
    cases = parser.parse_args().cases
    found: dict[str, Any] = {}
    bars: list[Bar] = []
    if "paced" in cases:
        (found["paced"],) = measure_cost(5.0, 1, [16])
    if "four" in cases:
        (found["four"],) = measure_cost(5.0, 4, [16])
    if "unpaced" in cases:
        found["unpaced_16"], found["unpaced_64"] = measure_cost(0.0, 1, [16, 64])
    print(json.dumps(found, indent=1))
    return finish("gateway", workload={}, bars=bars, figures=found)


if __name__ == "__main__":
    sys.exit(main())
