"""The gateway with real schedulers and two ranks: what a client sees when either dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway_mesh import GatewayMesh, gateway_mesh
from support.seldom import seldom

BODY: dict[str, Any] = {
    "model": "deepseek-flash",
    "messages": [{"role": "user", "content": "Hello"}],
    "thinking": {"type": "disabled"},
    "seed": 5,
    "ignore_eos": True,
    "max_tokens": 200,
    "n": 2,
}
RANK = {"SHOAL_MOCK_RANK_MS_PER_TOKEN": "5"}


def whole(mesh: GatewayMesh) -> dict[int, str]:
    answer = httpx.post(f"{mesh.url}/chat/completions", json=BODY, timeout=30)
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["message"]["content"] for one in answer.json()["choices"]}


def streamed(mesh: GatewayMesh, disturb: Callable[[], None]) -> dict[int, str]:
    """The same answer as a stream, disturbed after its fiftieth event."""
    said = {0: "", 1: ""}
    count = 0
    with httpx.stream("POST", f"{mesh.url}/chat/completions", json={**BODY, "stream": True}, timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                said[choice["index"]] += choice["delta"].get("content") or ""
                count += 1
                if count == 50:
                    disturb()
    assert line == "data: [DONE]" or not line
    return said


@pytest.mark.parametrize("how", [signal.SIGKILL, *seldom(signal.SIGTERM)])
def test_ranks_may_die_or_leave_in_the_middle_of_an_answer(tmp_path: Path, how: signal.Signals) -> None:
    rank = {**RANK, "SHOAL_MOCK_RANK_DRAIN_GRACE_S": "0.5", "SHOAL_MOCK_RANK_DRAIN_MOVE_S": "0.4"}
    with gateway_mesh(tmp_path, rank=rank, rank_count=2, scheduler_count=1) as mesh:
        want = whole(mesh)

        def end_the_busy_one() -> None:
            busy = max(mesh.ranks, key=running)
            busy.popen.send_signal(how)

        assert streamed(mesh, end_the_busy_one) == want
        assert whole(mesh) == want


def running(rank: Any) -> float:
    metrics = httpx.get(f"http://{rank.admin}/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("shoal_rpc_server_in_flight")]
    return sum(float(line.split()[-1]) for line in lines if "Generate" in line)


def test_a_dying_scheduler_costs_nothing_while_another_lives(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, rank=RANK, scheduler_count=2) as mesh:
        want = whole(mesh)
        assert streamed(mesh, mesh.schedulers[0].popen.kill) == want
        for _ in range(4):
            assert whole(mesh) == want


def test_without_any_scheduler_an_answer_goes_on_and_the_gateway_is_not_ready(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, rank=RANK, scheduler_count=1) as mesh:
        want = whole(mesh)
        assert streamed(mesh, mesh.schedulers[0].popen.kill) == want
        assert httpx.get(f"http://{mesh.http}/readyz").json()["missing"] == ["scheduler"]


def test_what_fits_no_rank_is_a_client_error(tmp_path: Path) -> None:
    with gateway_mesh(tmp_path, rank={"SHOAL_MOCK_RANK_BLOCK_COUNT": "4"}, scheduler_count=1) as mesh:
        answer = httpx.post(f"{mesh.url}/chat/completions", json={**BODY, "max_tokens": 3000}, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "exceeds_capacity")
