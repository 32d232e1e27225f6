"""What the gateway costs per token, against a server that does nothing but stream, in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
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
from bench.gateway_waits import (
    IDLE_STREAMS,
    NEVER_READ,
    TURNS,
    added_ms,
    count_prompt,
    direct_first_token_s,
    first_event_s,
    idle_streams_mb,
    many_files,
    never_read_mb,
)
from bench.harness import Bar, finish
from shoal_common.huge_pages import with_huge_pages
from shoal_gateway.served_model import packaged_model_dir
from support.gateway_mesh import GatewayMesh, gateway_mesh
from support.mesh import mesh

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
    "SHOAL_MOCK_RANK_MAX_CONTEXT": "8192",
    "SHOAL_MOCK_RANK_SLOT_COUNT": "2048",
    "SHOAL_MOCK_RANK_BLOCK_COUNT": "65536",
}


WORKLOAD: dict[str, Any] = {
    "answer_tokens": TOKENS,
    "rounds": ROUNDS,
    "window_s": WINDOW_S,
    "counted": "CPU of all server processes: null server; NATS, scheduler, gateway, rank. The client in none",
    "null": "asyncio streams, one write per token, no work per request",
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
def null_server(ms_per_token: float) -> Iterator[tuple[str, dict[str, int]]]:
    """Address and process of a null server; its memory is set up as that of services."""
    command = [sys.executable, "-m", "bench.gateway_null", "--ms-per-token", str(ms_per_token)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_huge_pages(os.environ))
    try:
        assert popen.stdout is not None
        port = json.loads(popen.stdout.readline())["port"]
        yield f"127.0.0.1:{port}", {"null": popen.pid}
    finally:
        popen.kill()
        popen.wait()


def processes(started: GatewayMesh) -> dict[str, int]:
    """Every process of the mesh."""
    named = {"gateway": started.gateway.popen.pid, "nats": started.nats.pid}
    named |= {f"rank{index}": rank.popen.pid for index, rank in enumerate(started.ranks)}
    return named | {f"scheduler{index}": one.popen.pid for index, one in enumerate(started.schedulers)}


async def window(address: str, pids: Mapping[str, int], streams: int) -> Window:
    """Load one server."""
    async with Load(address, BODY, streams) as load:
        await asyncio.sleep(WARM_UP_S)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        tally, own_s, began_s = load.reset(), time.process_time(), time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        return Window(
            # Streams go in step, so a window may hold the end of one answer more or less of each: events do not jump.
            tokens=round(TOKENS * tally.answers * tally.events / tally.answer_events),
            events=tally.events,
            wall_s=time.perf_counter() - began_s,
            cpu_s={name: cpu_s(pid) - before[name] for name, pid in pids.items()},
            client_cpu_s=time.process_time() - own_s,
        )


async def pairs(
    null: tuple[str, Mapping[str, int]], served: tuple[str, Mapping[str, int]], streams: int
) -> list[tuple[Window, Window]]:
    """Both servers turn by turn."""
    return [(await window(*null, streams), await window(*served, streams)) for _ in range(ROUNDS)]


def figures(measured: Sequence[tuple[Window, Window]]) -> dict[str, Any]:
    """Medians of all rounds, and the ratios of each round."""

    def middle(of: Callable[[Window], float], side: int) -> float:
        return round(median(of(pair[side]) for pair in measured), 3)

    def ratio(of: Callable[[Window], float]) -> float:
        return round(median(of(served) / of(null) for null, served in measured), 3)

    names = measured[0][1].cpu_s
    return {
        "cpu_ratio": ratio(lambda one: one.us_per_token),
        "cpu_ratio_with_client": ratio(lambda one: one.us_per_token_with_client),
        "tokens_s_ratio": ratio(lambda one: one.tokens_s),
        "cpu_ratio_of_each_round": [round(served.us_per_token / null.us_per_token, 3) for null, served in measured],
        "null_cpu_us_per_token": middle(lambda one: one.us_per_token, 0),
        "mesh_cpu_us_per_token": middle(lambda one: one.us_per_token, 1),
        "mesh_cpu_us_per_token_by_process": {
            name: round(median(1e6 * served.cpu_s[name] / served.tokens for _, served in measured), 3) for name in names
        },
        "client_cpu_us_per_token": [middle(lambda one: 1e6 * one.client_cpu_s / one.tokens, side) for side in range(2)],
        "tokens_s": [middle(lambda one: one.tokens_s, side) for side in range(2)],
        "tokens_per_event": [middle(lambda one: one.tokens / one.events, side) for side in range(2)],
    }


@contextlib.contextmanager
def mesh_of(
    ms_per_token: float, step_tokens: int, gateway_settings: Mapping[str, str] | None = None
) -> Iterator[GatewayMesh]:
    """A mesh whose rank makes so many tokens a step."""
    rank = {
        **RANK,
        "SHOAL_MOCK_RANK_MS_PER_TOKEN": str(ms_per_token),
        "SHOAL_MOCK_RANK_TOKENS_PER_STEP": str(step_tokens),
    }
    gateway = {"SHOAL_GATEWAY_MODEL": str(packaged_model_dir()), **(gateway_settings or {})}
    with (
        tempfile.TemporaryDirectory() as folder,
        gateway_mesh(Path(folder), rank=rank, gateway=gateway, scheduler_count=1) as started,
    ):
        yield started


def measure_cost(ms_per_token: float, step_tokens: int, streams: Sequence[int]) -> list[dict[str, Any]]:
    """Both servers at one pace, per number of streams."""
    with (
        mesh_of(ms_per_token, step_tokens) as started,
        null_server(ms_per_token) as null,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        here = (started.http, processes(started))
        return [figures(runner.run(pairs(null, here, count))) for count in streams]


def measure_local_ttft() -> dict[str, float]:
    """One stream at a time over a rank that takes no time, against the null server."""
    with mesh_of(0.0, 1) as started, null_server(0.0) as null:
        added, through, base = added_ms(first_event_s(started.http, BODY), first_event_s(null[0], BODY))
    return {"added_ms": added, "mesh_ms": through, "null_ms": base}


def measure_remote_ttft() -> dict[str, float]:
    """One stream at a time over the tiny model with its prompt from a prefill worker, against the decode worker's own
    `Generate` of as many tokens, which prefills by itself: what is added is all that the mesh does, the hand-over too.
    """
    settings = {
        "scheduler": {"REMOTE_PREFILL_TOKENS": "0", "REPLAY_TOKENS": "28"},
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "0"},
    }
    with tempfile.TemporaryDirectory() as folder, mesh(Path(folder), settings) as whole:
        address = str(whole["gateway"].ready["http"])
        prompt_tokens = count_prompt(address)
        base, stack = direct_first_token_s(whole, prompt_tokens)
        with stack:
            added, through, without = added_ms(first_event_s(address, {**BODY, "max_tokens": 2}), base)
        if whole.numbers("prefill_worker")["step_count"] <= TURNS:
            raise RuntimeError("the prompts did not come from the prefill worker")
    return {"added_ms": added, "mesh_ms": through, "decode_worker_ms": without, "prompt_tokens": prompt_tokens}


def measure_idle() -> dict[str, float]:
    """Streams that have begun and get a token every three seconds."""
    with many_files(4 * IDLE_STREAMS), mesh_of(3000.0, 1) as started:
        pid = started.gateway.popen.pid
        return {"added_mb": idle_streams_mb(started.http, started.gateway.admin, pid, BODY)}


def measure_never_read() -> dict[str, float]:
    """Readers that never read, twice; long answers, as fast as the rank makes them."""
    settings = {"SHOAL_GATEWAY_WRITE_TIMEOUT_S": "8"}
    with many_files(4 * NEVER_READ), mesh_of(0.0, 1, settings) as started:
        pid = started.gateway.popen.pid
        return never_read_mb(started.http, started.gateway.admin, pid, {**BODY, "max_tokens": 7500})


def bars_of(found: Mapping[str, Any]) -> list[Bar]:
    """The bars of the cases that were run."""
    bars = []
    for case, want in (("paced", 3.5), ("four", 2.0)):
        if case in found:
            bars.append(Bar(name=f"{case}_cpu", value=found[case]["cpu_ratio"], want=want, sense="at most", unit="x"))
    for case in ("unpaced_16", "unpaced_64"):
        if case in found:
            value = found[case]["tokens_s_ratio"]
            bars.append(Bar(name=f"{case}_tokens_s", value=value, want=0.5, sense="at least", unit="x"))
    for case, most in (("ttft_local", 5.0), ("ttft_remote", 8.0)):
        if case in found:
            bars.append(Bar(name=case, value=found[case]["added_ms"], want=most, sense="at most", unit="ms"))
    if "idle" in found:
        bars.append(Bar(name="idle_1000", value=found["idle"]["added_mb"], want=100, sense="at most", unit="MB"))
    if "never_read" in found:
        grown = found["never_read"]["after_second_round"] - found["never_read"]["after_first_round"]
        bars.append(Bar(name="never_read_growth", value=grown, want=10, sense="at most", unit="MB"))
    return bars


CASES: Mapping[str, Callable[[], Mapping[str, dict[str, Any]]]] = {
    "paced": lambda: {"paced": measure_cost(5.0, 1, [16])[0]},
    "four": lambda: {"four": measure_cost(5.0, 4, [16])[0]},
    "unpaced": lambda: dict(zip(("unpaced_16", "unpaced_64"), measure_cost(0.0, 1, [16, 64]), strict=True)),
    "ttft-local": lambda: {"ttft_local": measure_local_ttft()},
    "ttft-remote": lambda: {"ttft_remote": measure_remote_ttft()},
    "idle": lambda: {"idle": measure_idle()},
    "never-read": lambda: {"never_read": measure_never_read()},
}


def main() -> int:
    """All cases, or those named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all if none is named")
    named = parser.parse_args().cases or list(CASES)
    found: dict[str, Any] = {}
    for case in named:
        found |= CASES[case]()
    return finish("gateway", workload=WORKLOAD, bars=bars_of(found), figures=found)


if __name__ == "__main__":
    sys.exit(main())
