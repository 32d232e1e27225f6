"""What the mesh adds to a rank that takes no time: TTFT over HTTP against the rank's own stream, in one run."""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from bench.harness import Bar, finish, percentile
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from support.gateway_mesh import GatewayMesh, gateway_mesh

ROUNDS = 300
WARM_UP = 30
BODY: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Which way is it to the harbour, please? " * 4}],
    "thinking": {"type": "disabled"},
    "max_tokens": 4,
    "ignore_eos": True,
    "stream": True,
}


def through_gateway(connection: http.client.HTTPConnection, seed: int) -> float:
    """Seconds from the request to the first event of a stream."""
    body = json.dumps({**BODY, "seed": seed})
    began_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    took_s = time.perf_counter() - began_s
    if not first.startswith(b"data: {"):
        raise RuntimeError(f"no event came: {first!r} {answer.read()!r}")
    answer.read()
    return took_s


def at_the_rank(stub: Any, prompt_ids: list[int], seed: int) -> float:
    """Seconds from the call to the first tokens of the rank's own stream."""
    params = sampling_pb2.SamplingParams(max_tokens=BODY["max_tokens"], seed=seed, ignore_eos=True)
    request = pb.GenerateRequest(request_id=f"bench-{seed}", attempt=1, prompt_ids=prompt_ids, params=params)
    took_s = 0.0
    began_s = time.perf_counter()
    for event in stub.Generate(request, timeout=30):
        if event.HasField("entries") and not took_s:
            took_s = time.perf_counter() - began_s
    return took_s


def measure(mesh: GatewayMesh) -> int:
    """Both ways, turn by turn, and report."""
    host, _, port = mesh.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    through, direct = [], []
    with grpc.insecure_channel(mesh.ranks[0].address) as channel:
        stub = rpc.DecodeServiceStub(channel)
        for turn in range(WARM_UP + ROUNDS):
            through_s, direct_s = through_gateway(connection, turn), at_the_rank(stub, [7] * 120, turn)
            if turn >= WARM_UP:
                through.append(through_s)
                direct.append(direct_s)
    connection.close()
    added = percentile(through, 0.5) - percentile(direct, 0.5)
    status = Path(f"/proc/{mesh.gateway.popen.pid}/status").read_text()
    resident_mb = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return finish(
        "mesh",
        workload={"rounds": ROUNDS, "concurrency": 1, "output_tokens": BODY["max_tokens"], "base": "the rank's stream"},
        bars=[
            Bar(name="added_ttft_p50", value=added * 1e3, want=10, sense="at most", unit="ms"),
            Bar(name="gateway_resident", value=resident_mb, want=120, sense="at most", unit="MiB"),
        ],
        figures={
            "gateway_ttft_p50_ms": percentile(through, 0.5) * 1e3,
            "gateway_ttft_p99_ms": percentile(through, 0.99) * 1e3,
            "rank_ttft_p50_ms": percentile(direct, 0.5) * 1e3,
        },
    )


def main() -> int:
    """A mesh of its own, measured."""
    with tempfile.TemporaryDirectory() as folder, gateway_mesh(Path(folder), scheduler_count=1) as mesh:
        return measure(mesh)


if __name__ == "__main__":
    sys.exit(main())
