"""Runs other people's clients, which live in an environment of their own (`make install-clients`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CASES = REPOSITORY / "tests" / "clients"
_NANO = REPOSITORY / "kernels" / "shoal_nano" / "release"
_BIN = REPOSITORY / ".venv-clients" / "bin"


def run_client(
    program: str, arguments: Sequence[str], *, http: str, folder: Path, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """What a program of .venv-clients did in `folder`; GATEWAY_HTTP is `http`. Raises AssertionError if missing."""
    executable = _BIN / program
    are_there = executable.exists() and (CASES / "node_modules").exists()
    assert are_there, "other people's clients are not installed: make install-clients"
    return subprocess.run(
        [str(executable), *arguments],
        cwd=folder,
        env=_environment(http),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def assert_cases_pass(file: str, *, http: str, folder: Path) -> None:
    """Run the pytest cases of tests/clients/`file`. Raises AssertionError with what they printed."""
    settings = ["-P", "-m", "pytest", "-c", str(CASES / "pytest.ini"), "--confcutdir", str(CASES), "--tb", "short"]
    done = run_client("python", [*settings, str(CASES / file)], http=http, folder=folder)
    assert done.returncode == 0, f"{file}:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def assert_node_tests_pass(file: str, *, http: str, folder: Path) -> None:
    """Run the tests of tests/clients/`file` by Node's runner. Raises AssertionError with what they printed."""
    done = run_client("node", ["--test", "--test-reporter", "tap", str(CASES / file)], http=http, folder=folder)
    assert done.returncode == 0, f"{file}:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def tokenizer_folder(folder: Path) -> Path:
    """Nano's tokenizer as load tools read it."""
    made = folder / "tokenizer"
    made.mkdir()
    (made / "tokenizer.json").write_bytes((_NANO / "tokenizer.json").read_bytes())
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


def _environment(http: str) -> Mapping[str, str]:
    """The own one without what could lead a client elsewhere."""
    foreign = (
        "SHOAL_",
        "OPENAI_",
        "ANTHROPIC_",
        "LITELLM_",
        "PYTEST_",
        "COV_",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    )
    own = {key: value for key, value in os.environ.items() if not key.upper().startswith(foreign)}
    return {
        **own,
        "PATH": f"{_BIN}{os.pathsep}{own.get('PATH', '')}",
        "GATEWAY_HTTP": http,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
