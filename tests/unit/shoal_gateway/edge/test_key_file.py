"""A keys file that is written anew, replaced, spoiled and repaired under a running gateway."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from shoal_common.api_keys import hash_of
from shoal_gateway.edge.key_file import KeyFile
from shoal_gateway.edge.keys import ApiKey, BadKeys

OLD_NS = 1_000_000_000 * 1_000_000_000
"""A time at which no file of a test was written: one of these times is seen as it is."""


def text(*names: str) -> str:
    return "[keys]\n" + "\n".join(f'[keys.{name}]\nhash = "{hash_of(name * 30)}"' for name in names)


class Bench:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: list[list[str]] = []
        self.reports: list[bool] = []
        self.error: BadKeys | None = None
        self.file = KeyFile(path, use=self.use, report=self.reports.append)

    def use(self, keys: Sequence[ApiKey]) -> None:
        if self.error is not None:
            raise self.error
        self.used.append([one.key_id for one in keys])

    def write(self, content: str, *, mtime_ns: int = OLD_NS) -> None:
        self.path.write_text(content)
        os.utime(self.path, ns=(mtime_ns, mtime_ns))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path / "keys.toml")
    made.write(text("a"))
    made.file.load()
    assert made.used == [["a"]]
    return made


async def test_a_file_that_did_not_change_is_not_taken_again(bench: Bench) -> None:
    await bench.file.look()
    os.utime(bench.path, ns=(OLD_NS + 1, OLD_NS + 1))
    await bench.file.look()
    assert (bench.used, bench.reports) == ([["a"]], [])


async def test_a_file_written_anew_is_taken(bench: Bench) -> None:
    bench.write(text("a", "b"), mtime_ns=OLD_NS + 1)
    await bench.file.look()
    assert (bench.used[-1], bench.reports) == (["a", "b"], [True])


async def test_a_file_replaced_by_another_of_its_name_size_and_time_is_taken(bench: Bench) -> None:
    other = bench.path.with_suffix(".new")
    other.write_text(text("b"))
    os.utime(other, ns=(OLD_NS, OLD_NS))
    assert other.stat().st_size == bench.path.stat().st_size
    os.replace(other, bench.path)
    await bench.file.look()
    assert bench.used[-1] == ["b"]


async def test_a_link_that_points_elsewhere_is_followed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(text(name))
    link = tmp_path / "keys.toml"
    link.symlink_to("a")
    made = Bench(link)
    made.file.load()
    (tmp_path / "next").symlink_to("b")
    os.replace(tmp_path / "next", link)
    await made.file.look()
    assert made.used == [["a"], ["b"]]


async def test_a_file_changed_again_within_the_grain_of_its_time_is_taken(tmp_path: Path) -> None:
    made = Bench(tmp_path / "keys.toml")
    made.path.write_text(text("a"))
    stat = made.path.stat()
    made.file.load()
    made.write(text("b"), mtime_ns=stat.st_mtime_ns)
    await made.file.look()
    assert made.used[-1] == ["b"]


@pytest.mark.parametrize("bad", ["", "[keys.a]\nhash = 3", "[keys", "\udcff"])
async def test_a_spoiled_file_leaves_the_keys_before_in_force_and_says_so_once(
    bad: str, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.path.write_bytes(bad.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await bench.file.look()
    assert (bench.used, bench.reports) == ([["a"]], [False])
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == ("ERROR", "keys file not taken, the keys before stay in force")
    assert str(bench.path) in line.__dict__["error"]
    bench.write(text("b"), mtime_ns=OLD_NS + 2)
    await bench.file.look()
    assert (bench.used[-1], bench.reports) == (["b"], [False, True])


async def test_a_file_that_went_away_is_said_once_and_taken_when_it_is_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.path.unlink()
    for _ in range(3):
        await bench.file.look()
    assert len(caplog.records) == 1
    bench.write(text("a"))
    await bench.file.look()
    assert (bench.used, bench.reports) == ([["a"], ["a"]], [False, True])


async def test_keys_that_do_not_go_together_with_others_are_a_spoiled_file_too(bench: Bench) -> None:
    bench.error = BadKeys("keys.b: there are two keys of this name")
    bench.write(text("b"), mtime_ns=OLD_NS + 1)
    await bench.file.look()
    assert bench.reports == [False]


def test_a_start_with_a_file_that_is_missing_or_spoiled_is_refused(tmp_path: Path) -> None:
    made = Bench(tmp_path / "keys.toml")
    with pytest.raises(BadKeys, match="cannot be read: No such file"):
        made.file.load()
    made.path.write_text("[keys")
    with pytest.raises(BadKeys, match="not valid TOML"):
        made.file.load()
