"""The nano model through the gateway: one stream, eight together, DSpark on and off, first token, memory."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Bar, finish, percentile
from shoal_nano.tasks import held_out_items
from support.mesh import Mesh, mesh

SEED = 20
FAMILIES = ("copy", "sort", "json", "reason")
ITEMS = 6
PROMPT_100 = "Copy this text: " + " ".join(["harbour", "lamp", "stone", "river", "cloud"] * 10)
ROUNDS = 20
TORCH_FREE = ("gateway", "scheduler", "kv_cache")


@dataclass(frozen=True, slots=True)
class Answered:
    """One streamed answer: seconds to its first token and in all, and its usage."""

    first_s: float
    total_s: float
    usage: Mapping[str, int]


def stream(address: str, content: str, *, seed: int, max_tokens: int = 512) -> Answered:
    """One chat request without thinking, streamed."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = {
        "model": "deepseek-flash",
        "messages": [{"role": "user", "content": content}],
        "thinking": {"type": "disabled"},
        "temperature": 0,
        "seed": seed,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    first_s = 0.0
    usage: dict[str, int] = {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if not first_s and event["choices"] and event["choices"][0]["delta"].get("content"):
            first_s = time.perf_counter() - began_s
        usage = event.get("usage") or usage
    total_s = time.perf_counter() - began_s
    connection.close()
    return Answered(first_s or total_s, total_s, usage)


def questions() -> list[str]:
    """Held-out items, the longest answers of the tasks among them."""
    return [item.wanted.user for family in FAMILIES for item in held_out_items(family, ITEMS, SEED)]


def one_stream(address: str) -> list[Answered]:
    """One request after the other."""
    return [stream(address, content, seed=number) for number, content in enumerate(questions())]


def rate(answers: list[Answered]) -> float:
    """Completion tokens per second of the whole requests."""
    return sum(one.usage["completion_tokens"] for one in answers) / sum(one.total_s for one in answers)


def decode_rate(answers: list[Answered]) -> float:
    """Tokens per second after the first event."""
    return sum(one.usage["completion_tokens"] - 1 for one in answers) / sum(
        one.total_s - one.first_s for one in answers
    )


def together(address: str, count: int) -> float:
    """Tokens per second of `count` clients that ask at the same time."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda pair: stream(address, pair[1], seed=pair[0]), enumerate(questions())))
    return sum(answer.usage["completion_tokens"] for answer in answers) / (time.perf_counter() - began_s)


def resident_mb(running: Mesh, name: str) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{running[name].popen.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@contextmanager
def nano_mesh(verify_width: int) -> Iterator[Mesh]:
    """The five services with nano, local prefill for short prompts as shipped."""
    settings = {name: {"MODEL": "nano"} for name in ("prefill_worker", "decode_worker")} | {"gateway": {"MODEL": ""}}
    settings["decode_worker"]["VERIFY_WIDTH"] = str(verify_width)
    with tempfile.TemporaryDirectory() as folder, mesh(Path(folder), settings) as running:
        yield running


def address_of(running: Mesh) -> str:
    """host:port of the gateway's HTTP edge."""
    return running.http.removeprefix("http://")


def main() -> int:
    """Measure and report."""
    with nano_mesh(5) as running:
        address = address_of(running)
        stream(address, PROMPT_100, seed=0)
        first = [stream(address, f"{number} {PROMPT_100}", seed=number, max_tokens=4) for number in range(ROUNDS)]
        drafted = one_stream(address)
        eight_rate = together(address, 8)
        memory = {name: resident_mb(running, name) for name in running.processes}
    with nano_mesh(0) as running:
        address = address_of(running)
        stream(address, PROMPT_100, seed=0)
        plain = one_stream(address)
    gain = decode_rate(drafted) / decode_rate(plain)
    first_ms = percentile([one.first_s for one in first], 0.5) * 1e3
    torch_free = max(memory[name] for name in TORCH_FREE)
    worker = max(memory["decode_worker"], memory["prefill_worker"])
    same = [one.usage["completion_tokens"] for one in drafted] == [one.usage["completion_tokens"] for one in plain]
    return finish(
        "nano",
        workload={
            "families": FAMILIES,
            "items": len(questions()),
            "temperature": 0,
            "prompt_tokens_ttft": first[0].usage["prompt_tokens"],
            "rate": "completion tokens over the time from request to end of stream; on over off: after the first event",
        },
        bars=[
            Bar(name="one_stream", value=rate(drafted), want=40, sense="at least", unit="tokens/s"),
            Bar(name="eight_streams", value=eight_rate, want=120, sense="at least", unit="tokens/s"),
            Bar(name="dspark_on_over_off", value=gain, want=1.4, sense="at least", unit="x"),
            Bar(name="ttft_100_p50", value=first_ms, want=300, sense="at most", unit="ms"),
            Bar(name="torch_free_resident", value=torch_free, want=120, sense="at most", unit="MiB"),
            Bar(name="worker_resident", value=worker, want=700, sense="at most", unit="MiB"),
        ],
        figures={
            "plain_tokens_per_s": rate(plain),
            "whole_requests_on_over_off": rate(drafted) / rate(plain),
            "decode_tokens_per_s": decode_rate(drafted),
            "plain_decode_tokens_per_s": decode_rate(plain),
            "resident_mib": memory,
            "same_lengths_on_and_off": same,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
