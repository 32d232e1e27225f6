"""Services that are started before NATS is: alive, not ready, and a mesh as soon as it comes."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from shoal_client import Client
from support.asking import Question, ask
from support.mesh import is_ready, mesh, wait_for
from support.worker_pair import prompt_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def test_services_without_nats_are_alive_and_not_ready_and_join_when_it_comes(tmp_path: Path) -> None:
    with mesh(tmp_path, has_nats=False) as started:
        for name, process in started.processes.items():
            urllib.request.urlopen(f"http://{process.admin}/healthz", timeout=5).close()
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(f"http://{process.admin}/readyz", timeout=5)
            missing = raised.value.read().decode()
            assert "nats" in missing, name
        # A request that comes too early is held, not lost.
        with ThreadPoolExecutor(1) as pool:
            body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            early = pool.submit(httpx.post, f"{started.http}/v1/chat/completions", json=body, timeout=120)
            wait_for(lambda: started.numbers("gateway")["running"] == 1, what=lambda: "the request is held")
            started.nats.start()
            assert early.result().status_code == 200
        started.wait_ready()
        wait_for(lambda: started.addresses() <= started.on_bus(), what=lambda: "all on the bus", timeout_s=30)
        with Client(started.grpc) as client:
            assert len(ask(client, Question(prompt=tuple(prompt_of(300)))).tokens[0]) == 24
        assert all(is_ready(process) for process in started.processes.values())
