"""The supervisor of the local mesh with tiny real services: start, stop, failure, orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shoal_cli import down, stack_state, up
from shoal_cli.errors import CliError
from shoal_cli.main import main
from shoal_cli.stack_spec import SERVICES, StackOptions, service_specs
from shoal_cli.stack_state import ProcessRef, StackState
from support.nats_server import free_port

TESTS = Path(__file__).resolve().parents[2]


class Stack:
    """One run folder with two free addresses."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.http, self.grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
        self.environment["PYTHONPATH"] = str(TESTS)
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *bad: str) -> list[str]:
        return [sys.executable, "-m", "support.tiny_stack", str(self.run_dir), self.http, self.grpc, *bad]

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._started.append(process)
        wait(lambda: (state := self.state()) is not None and state.is_up, "the mesh is up")
        return process

    def run(self, *bad: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*bad),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def state(self) -> StackState | None:
        return stack_state.read(self.run_dir)

    def clean(self) -> None:
        state = self.state()
        if state is not None:
            down.stop_all((state.supervisor, *state.processes), 10.0)
        for process in self._started:
            process.wait(10)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path / "run")
    yield made
    made.clean()


def wait(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up, f"waited for: {what}"
        time.sleep(0.02)


def running(stack: Stack) -> tuple[ProcessRef, ...]:
    state = stack.state()
    assert state is not None
    assert [one.name for one in state.processes] == ["nats", "worker", "gateway"]
    assert all(one.is_alive for one in state.processes)
    return state.processes


def test_ctrl_c_stops_every_process_that_was_started(stack: Stack) -> None:
    supervisor = stack.start()
    processes = running(stack)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(20) == 0
    assert not any(one.is_alive for one in processes)
    assert not (stack.run_dir / "stack.json").exists()


def test_a_second_start_says_where_the_first_one_is(stack: Stack) -> None:
    stack.start()
    second = stack.run()
    assert second.returncode == 2
    assert second.stderr.splitlines() == [line for line in second.stderr.splitlines() if f"http://{stack.http}" in line]
    running(stack)


def test_the_failure_of_one_process_stops_the_others_and_is_told(stack: Stack) -> None:
    supervisor = stack.start()
    processes = running(stack)
    os.kill(processes[1].pid, signal.SIGKILL)
    assert supervisor.wait(20) == 1
    assert not any(one.is_alive for one in processes)
    assert supervisor.stderr is not None
    assert "worker ended unexpectedly: killed by SIGKILL" in supervisor.stderr.read()


def test_an_occupied_port_is_one_line_and_status_2_and_starts_nothing(stack: Stack) -> None:
    with socket.socket() as occupied:
        host, _, port = stack.http.rpartition(":")
        occupied.bind((host, int(port)))
        occupied.listen()
        ended = stack.run()
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert stack.http in ended.stderr
    assert not (stack.run_dir / "logs").exists()


def test_an_unreachable_nats_is_one_line_and_status_2(stack: Stack) -> None:
    ended = stack.run(SHOAL_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "SHOAL_NATS_URL" in ended.stderr
    assert stack.state() is None


def test_a_service_that_refuses_to_start_is_quoted_and_the_others_are_stopped(stack: Stack) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        ended = stack.run(address)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert f"worker did not start: shoal tiny: cannot listen on {address}" in ended.stderr
    assert stack.state() is None


def test_down_stops_what_a_killed_supervisor_left_behind(stack: Stack) -> None:
    supervisor = stack.start()
    processes = running(stack)
    supervisor.kill()
    supervisor.wait()
    refused = stack.run()
    assert refused.returncode == 2
    assert "shoal down" in refused.stderr
    assert main(["down", "--run-dir", str(stack.run_dir)]) == 0
    assert not any(one.is_alive for one in processes)


def test_up_returns_when_the_mesh_serves_and_down_ends_it(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert up.follow(stack.command(), stack.run_dir, environ=stack.environment, timeout_s=60) == 0
    processes = running(stack)
    assert stack.http in capsys.readouterr().out
    assert main(["down", "--run-dir", str(stack.run_dir)]) == 0
    assert not any(one.is_alive for one in processes)
    assert main(["down", "--run-dir", str(stack.run_dir)]) == 0


def test_up_passes_on_why_the_mesh_did_not_start(stack: Stack) -> None:
    command = [*stack.command()[:4], "nonsense", stack.grpc]
    with pytest.raises(CliError, match="must be HOST:PORT"):
        up.follow(command, stack.run_dir, environ=stack.environment, timeout_s=60)


@pytest.mark.parametrize("start", ["print('nats  here', flush=True)", "print('nats  ', end='', flush=True)"])
def test_up_leaves_the_reason_to_whoever_prints_the_error(
    start: str, stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor goes on for a while after it has said why: it stops the others."""
    reason = "print('shoal: worker ended unexpectedly: no device', file=sys.stderr, flush=True)"
    command = [sys.executable, "-c", f"import sys, time; {start}; time.sleep(0.2); print(); {reason}; time.sleep(0.3)"]
    with pytest.raises(CliError, match=r"^worker ended unexpectedly: no device$"):
        up.follow(command, stack.run_dir, environ=stack.environment, timeout_s=60)
    said = capsys.readouterr().out
    assert said.startswith("nats  ")
    assert "no device" not in said


def test_a_process_id_that_means_another_process_is_not_ours() -> None:
    me = ProcessRef.of("me", os.getpid())
    assert me.is_alive
    assert not ProcessRef("me", me.pid, me.started_ticks + 1).is_alive


def test_the_five_services_get_addresses_but_what_the_user_sets_stands() -> None:
    environ = {"SHOAL_GATEWAY_DRAIN_GRACE_S": "9", "SHOAL_MESH": "other", "PATH": "/bin"}
    options = StackOptions(mesh="blue", model=Path("/models/x"))
    specs = {spec.name: spec for spec in service_specs(options, environ, nats_url="nats://h:1")}
    assert tuple(specs) == SERVICES
    gateway, worker = specs["gateway"].environment, specs["decode_worker"].environment
    assert gateway["SHOAL_GATEWAY_HTTP_ADDRESS"] == "127.0.0.1:8000"
    assert gateway["SHOAL_GATEWAY_MODEL"] == "/models/x"
    assert gateway["SHOAL_GATEWAY_DRAIN_GRACE_S"] == "9"
    assert worker["SHOAL_DECODE_WORKER_LISTEN_ADDRESS"] == "127.0.0.1:0"
    assert worker["SHOAL_DECODE_WORKER_MODEL"] == "/models/x"
    assert (worker["SHOAL_MESH"], worker["SHOAL_NATS_URL"], worker["PATH"]) == ("blue", "nats://h:1", "/bin")
    assert gateway["PYTHONMALLOC"] == worker["PYTHONMALLOC"] == "malloc"
    assert specs["decode_worker"].command[1:] == ("-P", "-m", "shoal_decode_worker")
