from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from shoal_cli import status
from shoal_cli.errors import CliError
from shoal_cli.main import COMMANDS, main
from shoal_common.announcer import Announcer
from shoal_common.load import LoadReport
from shoal_common.presence import Presence
from support.checkpoints import TINY
from support.nats_server import NatsServer, free_port


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_a_reader_that_leaves_early_ends_the_command_without_a_word() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-m", "shoal_cli", "model", "inspect", str(TINY)]
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=30, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_unknown_command_is_refused_with_status_2() -> None:
    with pytest.raises(SystemExit) as left:
        main(["swim"])
    assert left.value.code == 2


def test_help_imports_no_subcommand() -> None:
    program = (
        "import sys, contextlib, shoal_cli.main as m\n"
        "with contextlib.suppress(SystemExit): m.main(['--help'])\n"
        "print(sorted({'grpc', 'nats', 'torch', 'shoal_cli.run'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"


async def test_status_shows_live_instances_with_their_load(nats_server: NatsServer) -> None:
    worker = Presence(instance_id="decode_worker-1", role="decode_worker", address="127.0.0.1:7")
    load = LoadReport(
        running=2, free_blocks=25, total_blocks=100, free_slots=6, total_slots=8, draft_tokens=10, accepted_tokens=4
    )
    announcer = Announcer(nats_url=nats_server.url, mesh="t", presence=worker, sample_load=lambda: load)
    announcer.start()
    try:
        fleet = await status.observe(nats_server.url, "t")
    finally:
        await asyncio.to_thread(announcer.stop)
    assert fleet == [(worker, load)]
    _, row = status.table(fleet).splitlines()
    assert row.split() == ["decode_worker-1", "127.0.0.1:7", "live", "2", "0", "6/8", "75%", "40%"]


def test_a_seed_that_is_none_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "shoal: --seed or --max-tokens: Value out of range: -1\n"


async def test_a_look_at_the_mesh_loses_no_connection(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    await status.observe(nats_server.url, "t")
    assert not caplog.records


async def test_status_says_that_nats_cannot_be_reached() -> None:
    with pytest.raises(CliError, match="cannot be reached"):
        await status.observe(f"nats://127.0.0.1:{free_port()}", "t")
