"""`shoal model inspect` as a user sees it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from shoal_cli import model
from shoal_cli.main import main
from support.checkpoints import TINY, write_released_index


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="shoal")
    model.add_parser(parser.add_subparsers(dest="command", required=True))
    return model.run(parser.parse_args(["model", *arguments]))


def test_the_release_is_described_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(write_released_index(tmp_path)), "--ranks", "32", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"] == 96_085
    assert report["parameters"] == 763_205_315_794
    assert report["kv_bytes_per_token"] == 890
    assert report["snapshot_bytes"] == 1_351_680
    assert report["rank"]["experts"] == 12
    assert [layer["mode"] for layer in report["layers"][:4]] == ["swa", "swa", "full", "reuse"]


def test_a_checkpoint_is_described_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(TINY), "--ranks", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,016 tensors, 4,431,370 parameters, 4.775 MB (4,774,802 bytes)"
    assert "cache: 140 bytes a token" in lines[3]
    assert [line.split()[3] for line in lines if line.split()[1:2] == ["decoder"]] == [
        "full",
        "reuse",
        "reindex",
        "reuse",
    ]
    assert "one rank of 2: 4.133 MB" in lines


def test_a_folder_without_a_checkpoint_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"shoal model inspect: {tmp_path / 'config.json'}: cannot be read: No such file or directory\n"
    )


def test_too_many_ranks_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(TINY), "--ranks", "9") == 2
    assert capsys.readouterr().err.splitlines() == [
        "shoal model inspect: ranks must be between 1 and 8 (routed experts), got 9"
    ]


def test_logits_of_a_sequence_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "logits.safetensors"
    assert run("logits", str(TINY), "--ids", "0,3,267", "--out", str(out), "--numerics", "exact") == 0
    assert capsys.readouterr().out == f"{out}: logits [3, 512], numerics exact\n"
    assert load_file(out)["logits"].shape == (3, 512)


def test_a_token_id_outside_the_vocabulary_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("logits", str(TINY), "--ids", "1,512", "--out", str(tmp_path / "x")) == 2
    assert capsys.readouterr().err == "shoal model logits: token id 512 is not in [0, 512)\n"


def test_ids_that_are_no_numbers_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("logits", str(TINY), "--ids", "1,x", "--out", str(tmp_path / "x"))
    assert "'1,x' is not a comma separated list of token ids" in capsys.readouterr().err


def test_nano_is_a_name_for_the_model_that_comes_with_shoal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", "nano"]) == 0
    assert "context 8,192" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "problem"), [("gpu", "cpu, cuda"), ("npu", "not yet run")])
def test_a_device_that_is_none_is_one_line_and_exit_2(
    device: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "logits.safetensors")
    assert run("logits", str(TINY), "--ids", "1,2", "--out", out, "--device", device) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
