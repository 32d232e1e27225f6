"""Thousands of bodies, right and wrong, made from the served OpenAPI document: every answer is one that it tells of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.gateway_mesh import gateway_mesh

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
CHECKS = (
    "no_server_fault",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


def test_no_answer_is_off_its_schema_and_none_is_a_fault(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    with gateway_mesh(tmp_path / "mesh", rank={"SHOAL_MOCK_RANK_MAX_CONTEXT": "512"}) as mesh:
        url = f"http://{mesh.http}/openapi.json"
        ran = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "schemathesis.cli", "run", url),
                *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
                *("--seed", "1", "--generation-deterministic"),
                *("--max-examples", "25", "--continue-on-failure", "--request-timeout", "20", "--no-color"),
                *("--suppress-health-check", "all", "--warnings", "off"),
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "openapi_checks",
                "PYTHONPATH": str(TESTS / "support"),
                "SHOAL_OPENAPI_RECORD": str(record),
            },
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
        described = httpx.get(url, timeout=10).json()["paths"]
    described.pop("/openapi.json")  # What a document is read from is not asked as an operation.
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    told = json.loads(record.read_text())
    for path, methods in described.items():
        for method, operation in methods.items():
            answered = told[f"{method.upper()} {path}"]
            # Nothing is shown by an operation that only ever refused.
            for content_type in operation["responses"]["200"]["content"]:
                assert answered.get(f"200 {content_type}"), (method, path, answered)
            if "requestBody" in operation:
                assert answered.get("400 application/json"), (method, path, answered)
