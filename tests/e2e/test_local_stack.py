"""`shoal run`, `up`, `status`, `chat` on the real five services, as from a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_cli import stack_state
from shoal_cli.stack_state import StackState
from support.checkpoints import FIRST_SHARD, TINY, copy_tiny
from support.mesh import wait_for
from support.nats_server import free_port

pytestmark = pytest.mark.timeout(240)

SHOAL = (sys.executable, "-P", "-m", "shoal_cli")
SERVICES = {"scheduler", "kv_cache", "prefill_worker", "decode_worker", "gateway"}


class Terminal:
    """Runs `shoal` commands on one run folder. Answers are short: the workers' context is small."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.http, self.grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        own = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
        self.environment = {
            **own,
            "SHOAL_CLI_RUN_DIR": str(run_dir),
            "SHOAL_MESH": "terminal",
            "SHOAL_DECODE_WORKER_MAX_CONTEXT": "384",
            "OMP_NUM_THREADS": "1",
        }

    def start_command(self, name: str, *more: str, model: Path = TINY) -> list[str]:
        return [*SHOAL, name, "--http", self.http, "--grpc", self.grpc, "--model", str(model), *more]

    def call(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**self.environment, **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    def state(self) -> StackState:
        state = stack_state.read(self.run_dir)
        assert state is not None
        return state

    def is_up(self) -> bool:
        state = stack_state.read(self.run_dir)
        return state is not None and state.is_up


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def running(terminal: Terminal) -> Iterator[subprocess.Popen[str]]:
    """`shoal run` in a process group of its own, as a shell starts it; its question is answered."""
    output = terminal.run_dir / "output"
    with output.open("w") as said:
        process = subprocess.Popen(
            terminal.start_command("run", "--ask", "Hi"),
            env=terminal.environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "Ctrl-C" in output.read_text(errors="replace"), what=output.read_text, timeout_s=120)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def test_run_shows_each_service_and_the_answer_to_its_question(
    terminal: Terminal, running: subprocess.Popen[str]
) -> None:
    lines = (terminal.run_dir / "output").read_text(errors="replace").splitlines()
    assert {line.split()[0] for line in lines if line.endswith(" s")} == SERVICES
    asked = lines.index("> Hi")
    assert len("".join(lines[asked + 1 : -1])) > 20
    assert terminal.state().http_address == terminal.http


@pytest.mark.parametrize("name", ["run", "up"])
def test_a_second_start_says_so_and_points_at_the_first(
    terminal: Terminal, running: subprocess.Popen[str], name: str
) -> None:
    ended = terminal.call(*terminal.start_command(name))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "up already" in line
    assert f"http://{terminal.http}" in line
    assert running.poll() is None


def test_status_shows_every_instance_with_load_and_acceptance(
    terminal: Terminal, running: subprocess.Popen[str]
) -> None:
    ended = terminal.call(*SHOAL, "status")
    assert ended.returncode == 0, ended.stderr
    header, *rows = ended.stdout.splitlines()
    assert header.split() == [
        "instance",
        "address",
        "state",
        "running",
        "waiting",
        "slots",
        "free",
        "KV",
        "used",
        "accepted",
    ]
    by_role = {row.split()[0].rpartition("-")[0]: row.split() for row in rows}
    assert by_role.keys() == SERVICES
    assert {row[2] for row in by_role.values()} == {"live"}
    assert by_role["decode_worker"][5:7] == ["32/32", "0%"]
    assert by_role["decode_worker"][7].endswith("%")


def test_chat_answers_in_a_terminal_and_leaves_at_its_end(terminal: Terminal, running: subprocess.Popen[str]) -> None:
    pid, screen = pty.fork()
    if pid == 0:
        os.execvpe(sys.executable, [*SHOAL, "chat", "--max-tokens", "8", "--seed", "1"], terminal.environment)
    shown = b""

    def read_until(wanted: bytes, count: int = 1) -> None:
        nonlocal shown
        give_up = time.monotonic() + 60
        while shown.count(wanted) < count:
            assert time.monotonic() < give_up, shown
            if select.select([screen], [], [], 0.1)[0]:
                shown += os.read(screen, 4096)

    try:
        read_until(b"> ")
        os.write(screen, b"Hi\n")
        read_until(b"8 out,")
        read_until(b"> ", 2)
        os.write(screen, b"And now?\n")
        read_until(b"8 out,", 2)
        read_until(b"> ", 3)
        os.write(screen, b"\x04")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(screen)


def test_ctrl_c_stops_all_that_was_started_and_nothing_else(terminal: Terminal, running: subprocess.Popen[str]) -> None:
    state = terminal.state()
    assert {one.name for one in state.processes} == SERVICES | {"nats"}
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(30) == 0
        assert not [one.name for one in state.processes if one.is_alive]
        assert stack_state.read(terminal.run_dir) is None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_status_of_nothing_is_one_line_and_status_2(terminal: Terminal) -> None:
    ended = terminal.call(*SHOAL, "status", SHOAL_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["run", "up"])
def test_a_checkpoint_with_a_missing_shard_is_one_line_and_leaves_nothing_running(tmp_path: Path, name: str) -> None:
    terminal = Terminal(tmp_path / "run")
    damaged = copy_tiny(tmp_path)
    (damaged / FIRST_SHARD).unlink()
    ended = terminal.call(*terminal.start_command(name, model=damaged))
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert FIRST_SHARD in line
    assert stack_state.read(terminal.run_dir) is None
    assert not processes_with(str(terminal.run_dir))


@pytest.mark.parametrize("name", ["run", "up"])
def test_an_unreachable_nats_is_one_line_and_leaves_nothing_running(tmp_path: Path, name: str) -> None:
    terminal = Terminal(tmp_path / "run")
    url = f"nats://127.0.0.1:{free_port()}"
    ended = terminal.call(*terminal.start_command(name), SHOAL_NATS_URL=url)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert url in line
    assert not processes_with(str(terminal.run_dir))


def processes_with(run_dir: str) -> list[int]:
    """Ids of the processes that were started with this run folder in their environment."""
    wanted = f"SHOAL_CLI_RUN_DIR={run_dir}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in environment:
                found.append(int(folder.name))
    return found
