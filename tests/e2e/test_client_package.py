"""The gRPC client as its users get it: the wheel with its `client` extra, alone in a fresh environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shoal_client import Client, SamplingParams, generation
from support.mesh import Mesh
from support.other_clients import CASES, REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with `shoal[client]` from the wheel built of this tree."""
    folder = tmp_path_factory.mktemp("alone")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY)
    [wheel] = folder.glob("shoal-*.whl")
    call(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", f"{wheel}[client]")
    return python


def call(*command: str | Path) -> str:
    """Standard output of a command. Raises AssertionError with its errors if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
    return done.stdout


def test_the_client_brings_grpcio_and_protobuf_only(alone: Path) -> None:
    listed: list[dict[str, str]] = json.loads(call(alone, "-m", "pip", "list", "--format", "json"))
    names = {one["name"].lower().replace("_", "-") for one in listed} - {"pip", "setuptools"}
    # typing-extensions is grpcio's.
    assert names == {"shoal", "grpcio", "protobuf", "typing-extensions"}
    call(alone, "-m", "pip", "check")


def test_text_and_tokens_whole_and_streamed_are_what_this_trees_client_gets(
    alone: Path, whole: Mesh, client: Client
) -> None:
    # Away from the tree and its paths: what is not in the wheel cannot be found.
    said: dict[str, Any] = json.loads(call(alone, "-I", CASES / "embedded.py", whole.grpc))
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=3)
    wanted = client.generate(generation([0, 40, 41, 42], sampling=sampling)).choices[0].output
    assert said["whole tokens"] == ["", list(wanted.tokens.ids)]
    assert len(wanted.tokens.ids) == 12
    for name in ("talk", "text", "tokens"):
        ways = [said[f"{way} {name}"] for way in ("whole", "stream", "async whole", "async stream")]
        assert ways == [ways[0]] * 4
        assert any(ways[0])
    assert "deepseek-flash" in said["models"]
    assert said["refused"] == "INVALID_ARGUMENT"
    assert {name for name in said["loaded"] if name.startswith("shoal")} == {"shoal", "shoal_client"}


def test_the_page_about_the_client_is_a_program_that_runs(
    alone: Path, whole: Mesh, client: Client, tmp_path: Path
) -> None:
    page = (REPOSITORY / "docs" / "client.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert program.count("127.0.0.1:8001") == 2
    (tmp_path / "page.py").write_text(program.replace("127.0.0.1:8001", whole.grpc))
    said = call(alone, "-I", tmp_path / "page.py")
    assert re.search(r"^[0-9]{2}$", said, re.MULTILINE)
    assert "INVALID_ARGUMENT INVALID_ARGUMENT generation.n: " in said
