"""A process that works on the disk tier is killed, at random moments and at named points; the next must find all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.ssd_items import number_by_key, opened, readable, segment_files

POINTS = (
    "append.begun",
    "append.written",
    "torn",
    "sync.begun",
    "sync.done",
    "roll.begun",
    "roll.created",
    "roll.headed",
    "retire.durable",
    "retire.deleted",
    "checkpoint.begun",
    "index",
    "checkpoint.done",
    "recovery.cut",
)
MAX_OPERATIONS = 60


class Driver:
    """The process that forks the processes that die."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.ssd_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def round(self, **request: object) -> list[dict[str, Any]]:
        """What one child said, its end last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            said.append(json.loads(line))
            if "ended" in said[-1]:
                return said
        raise AssertionError("the driver ended")

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


@dataclass
class Promises:
    """What was promised before a crash: numbers that must be there, that must not, and that may."""

    there: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    following: int = 0

    def hear(self, said: list[dict[str, Any]]) -> None:
        """Takes in what a child said."""
        for message in said:
            assert "bug" not in message, message
            assert "failed" not in message, message
            for word, numbers in message.items():
                if word == "put":
                    self.maybe |= set(numbers)
                    self.following = max(self.following, *(number + 1 for number in numbers))
                elif word == "is_put":
                    self._move(numbers, self.there)
                elif word == "remove":
                    self._move(numbers, self.maybe)
                elif word == "is_removed":
                    self._move(numbers, self.gone)

    def settle(self, found: set[int]) -> None:
        """Compares with what a new process finds; what was open is decided now."""
        assert not self.there - found, "acknowledged, and lost"
        assert not found - self.there - self.maybe, "removed, and back"
        self.gone |= (self.there | self.maybe) - found
        self.there, self.maybe = set(found), set()

    def _move(self, numbers: list[int], to: set[int]) -> None:
        for held in (self.there, self.gone, self.maybe):
            held.difference_update(numbers)
        to.update(numbers)


def check(directory: Path, promises: Promises) -> None:
    """Opens the tier as the next process would."""
    tier, found = opened(directory)
    numbers = number_by_key(promises.following)
    good = readable(tier, found, numbers)
    tier.close()
    assert good == {numbers[key] for key in found}, "found, and not readable"
    promises.settle(good)


def crash_often(driver: Driver, directory: Path, rounds: int, seed: int, fsync: str) -> int:
    """Rounds at every point and at random moments, on one folder; returns how many ended by the signal."""
    rng = random.Random(seed)
    promises = Promises()
    killed = 0
    for index in range(rounds):
        request: dict[str, object] = {
            "directory": str(directory),
            "seed": rng.randrange(1 << 30),
            "fsync": fsync,
            "point": POINTS[index // 2 % len(POINTS)] if index % 2 else "none",
            "nth": rng.randrange(1, 4),
            "operations": rng.randrange(1, MAX_OPERATIONS),
            "first": promises.following,
        }
        if not index % 2:
            request["kill_after_s"] = rng.random() * 0.15
        if request["point"] == "recovery.cut":
            append_garbage(directory, rng)
            request["nth"] = 1
        said = driver.round(**request)
        killed += said[-1]["ended"] != 0
        promises.hear(said)
        if rng.random() < 0.2:
            for part in ("data.mdb", "lock.mdb"):
                (directory / "index" / part).unlink(missing_ok=True)
        check(directory, promises)
    return killed


def append_garbage(directory: Path, rng: random.Random) -> None:
    """A torn end, for the next start to cut off."""
    files = segment_files(directory)
    if files:
        with files[-1].open("ab") as file:
            file.write(rng.randbytes(rng.randrange(1, 20_000)))


@pytest.mark.parametrize("fsync", ["always", pytest.param("interval", marks=pytest.mark.long)])
def test_nothing_acknowledged_is_lost_to_a_killed_process(driver: Driver, tmp_path: Path, fsync: str) -> None:
    assert crash_often(driver, tmp_path, 2 * len(POINTS), seed=1, fsync=fsync) > len(POINTS)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_nothing_acknowledged_is_lost_to_many_killed_processes(
    driver: Driver, tmp_path: Path, fsync: str, seed: int
) -> None:
    assert crash_often(driver, tmp_path, 8 * len(POINTS), seed=100 + seed, fsync=fsync) > 2 * len(POINTS)
