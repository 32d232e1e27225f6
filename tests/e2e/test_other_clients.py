"""Clients and load tools that people already use, unchanged, against nano served by the whole mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mesh import NANO, Mesh, mesh
from support.other_clients import assert_cases_pass, assert_node_tests_pass, run_client, tokenizer_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("nano"), NANO) as running:
        yield running


@pytest.fixture
def nano(served: Mesh) -> Iterator[Mesh]:
    """Whatever a client did, nothing is held after it."""
    yield served
    served.wait_idle()


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_a_python_client_works_unchanged(nano: Mesh, tmp_path: Path, client: str) -> None:
    assert_cases_pass(f"{client}_cases.py", http=nano.http, folder=tmp_path)


def test_the_vercel_ai_sdk_works_unchanged(nano: Mesh, tmp_path: Path) -> None:
    assert_node_tests_pass("vercel.test.mjs", http=nano.http, folder=tmp_path)


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
def test_aiperf_completes_a_run(nano: Mesh, tmp_path: Path, endpoint: str) -> None:
    load = ["--request-count", "16", "--concurrency", "4", "--isl", "50", "--osl", "12", "--random-seed", "3"]
    known = ["--tokenizer", str(tokenizer_folder(tmp_path)), "--ui", "none"]
    # Of Responses it reads the usage of `completed` ones only; these end by length.
    has_usage = endpoint != "responses"
    if has_usage:
        known.append("--use-server-token-count")
    asked = ["--model", "deepseek-flash", "--url", nano.http, "--endpoint-type", endpoint, "--streaming"]
    ended = ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path)]
    done = run_client("aiperf", ["profile", *asked, *load, *known, *ended], http=nano.http, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["is_complete"], report["error_summary"]) == (True, [])
    assert report["request_count"]["avg"] == 16
    counted = report["output_sequence_length"]["avg"]
    assert counted == 12 if has_usage else counted > 1
    assert report["time_to_first_token"]["avg"] > 0


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses"])
def test_guidellm_completes_a_run(nano: Mesh, tmp_path: Path, endpoint: str) -> None:
    backend = f"kind=openai_http,target={nano.http},model=deepseek-flash,request_format=/v1/{endpoint}"
    load = ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    data = ["--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=12"]
    known = ["--tokenizer", f"kind=huggingface_auto,model={tokenizer_folder(tmp_path)}", "--disable-console"]
    written = ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    done = run_client(
        "guidellm", ["run", "--backend", backend, *load, *data, *known, *written], http=nano.http, folder=tmp_path
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    [run] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    told = f"scheduler: {run['scheduler_metrics']['requests_made']}, {run['scheduler_state']}; {done.stderr[-2000:]}"
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (16, 0, 0), told
    assert {one["output_tokens"] for one in run["requests"]["successful"]} == {12}
