"""`shoal model generate` as a user sees it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from shoal_cli import model
from shoal_engine import LLM, SamplingParams
from support.tiny_model import TINY


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="shoal")
    model.add_parser(parser.add_subparsers(dest="command", required=True))
    return model.run(parser.parse_args(["model", *arguments]))


def test_a_text_is_continued_as_the_offline_llm_continues_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", str(TINY), "--prompt", "def f(x):", "--max-tokens", "6", "--stats") == 0
    captured = capsys.readouterr()
    with LLM(TINY, max_num_seqs=1) as llm:
        (expected,) = llm.generate("def f(x):", SamplingParams(temperature=0.0, max_tokens=6))
    assert captured.out == f"{expected}\n"
    assert "output tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--max-tokens", "0"), "max_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--seed", "-1"), "seed"),
        (("--threads", "0"), "threads"),
        (("--device", "gpu"), "device"),
        (("--device", "npu"), "device"),
        (("--synthetic", "released"), "--synthetic takes neither"),
        (("--layers", "4"), "--layers"),
        (("--ep-size", "64"), "--layers"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_2(
    arguments: tuple[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", str(TINY), "--prompt", "x", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shoal model generate: {problem}")


def test_a_folder_without_a_model_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", str(tmp_path), "--prompt", "x") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--layers", "3"), "synthetic"),
        (("--ep-size", "5"), "synthetic"),
        (("--prompt", "x"), "--synthetic takes neither"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
    ],
)
def test_a_synthetic_model_that_cannot_be_is_one_line_and_exit_2(
    arguments: tuple[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--synthetic", "released", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shoal model generate: {problem}")


def test_neither_a_folder_nor_a_synthetic_model_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "x") == 2
    assert "needs DIR and --prompt" in capsys.readouterr().err
