from __future__ import annotations

import io
import sys

import pytest
from shoal_cli.main import main
from shoal_common import api_keys
from shoal_gateway.edge.key_table import read_table
from shoal_gateway.edge.keys import KeyRing


def test_a_new_key_opens_with_the_entry_that_comes_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "alice"]) == 0
    shown = capsys.readouterr()
    key = shown.err.splitlines()[0]
    assert key not in shown.out
    found = KeyRing(read_table(shown.out), blind=b"b").find(key.encode(), 0.0)
    assert found is not None
    assert found.key_id == "alice"


def test_a_name_that_the_file_could_not_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "a.b"]) == 2
    assert "a name has" in capsys.readouterr().err


def test_two_new_keys_differ_and_say_whose_they_are() -> None:
    first, second = api_keys.new_key(), api_keys.new_key()
    assert first != second
    assert first.startswith("sk-shoal-")


def test_a_key_is_hashed_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a-key-of-somebody-elses-making\n"))
    assert main(["key", "hash"]) == 0
    # printf %s a-key-of-somebody-elses-making | sha256sum
    expected = "sha256:1c377fa9a307c581f8c0eec4ceb9688d6c46e0d38534c9a02bb22a50aa547609"
    assert capsys.readouterr().out.strip() == expected


@pytest.mark.parametrize("bad", ["", "short", "with spaces in it, twenty-four", "ü" * 30, "x" * 513])
def test_a_weak_or_unsendable_key_is_refused_without_being_repeated(
    bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(bad + "\n"))
    assert main(["key", "hash"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal: a key ")
    assert not bad or bad not in said
