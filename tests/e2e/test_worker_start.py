"""What a worker says when it cannot start."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.seldom import seldom
from support.service_process import service_process
from support.worker_pair import TINY, wait_until_ready

DECODE, PREFILL = "shoal_decode_worker", "shoal_prefill_worker"
FLAGS = ("--block-count", "--slot-count", "--step-tokens")


def start(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", module, *flags]
    env = {"SHOAL_NATS_URL": "off", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


@pytest.mark.parametrize("module", [DECODE, *seldom(PREFILL)])
def test_a_folder_without_a_model_is_one_line_and_exit_2(module: str, tmp_path: Path) -> None:
    ended = start(module, "--model", str(tmp_path))
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert "config.json" in ended.stderr


@pytest.mark.parametrize("module", [PREFILL, *seldom(DECODE)])
def test_a_missing_shard_is_named_in_one_line_with_exit_2(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    ended = start(module, "--model", str(folder))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "model-00002-of-00002.safetensors" in ended.stderr


@pytest.mark.parametrize(
    ("module", "flag"),
    [*((DECODE, flag) for flag in FLAGS), (PREFILL, FLAGS[0]), *seldom(*((PREFILL, flag) for flag in FLAGS[1:]))],
)
def test_a_setting_out_of_range_is_named_with_exit_2(module: str, flag: str) -> None:
    ended = start(module, flag, "0")
    assert ended.returncode == 2
    assert f"SHOAL_{module.removeprefix('shoal_').upper()}_{flag[2:].replace('-', '_').upper()}" in ended.stderr


@pytest.mark.parametrize(
    ("module", "is_ready"), [(DECODE, True), (PREFILL, False), *seldom((DECODE, False), (PREFILL, True))]
)
def test_sigterm_ends_a_worker_and_its_shared_memory(module: str, is_ready: bool, tmp_path: Path) -> None:
    name = module.removeprefix("shoal_").upper()
    with service_process(module, log=tmp_path / "log", environment={f"SHOAL_{name}_MODEL": str(TINY)}) as worker:
        if is_ready:
            wait_until_ready(worker, timeout_s=240)
        worker.popen.send_signal(signal.SIGTERM)
        assert worker.popen.wait(20) == 0, (tmp_path / "log").read_text()[-2000:]
        assert not list(Path("/dev/shm").glob(f"shoal-kv-{worker.popen.pid}-*"))
