"""What starts a service on huge pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shoal_common.huge_pages import PYTHON, TUNABLES, with_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DOCKERFILE = Path(__file__).parents[3] / "deploy" / "Dockerfile"


def glibc_version() -> tuple[int, ...]:
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()


PROGRAM = """
objects = [object() for _ in range(1_000_000)]
rollup = open("/proc/self/smaps_rollup").read()
print(rollup.split("AnonHugePages:")[1].split()[0])
"""


def test_an_empty_environment_gets_both() -> None:
    assert with_huge_pages({}) == {TUNABLES: "glibc.malloc.hugetlb=1", PYTHON: "malloc"}


def test_everything_else_stays() -> None:
    assert with_huge_pages({"PATH": "/bin"})["PATH"] == "/bin"


def test_other_tunables_stay() -> None:
    given = {TUNABLES: "glibc.malloc.arena_max=2"}
    assert with_huge_pages(given)[TUNABLES] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("given", ["glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=2:glibc.malloc.arena_max=1"])
def test_what_the_user_says_of_huge_pages_stands(given: str) -> None:
    assert with_huge_pages({TUNABLES: given})[TUNABLES] == given


def test_the_users_allocator_stands() -> None:
    assert with_huge_pages({PYTHON: "debug"})[PYTHON] == "debug"


def test_twice_is_once() -> None:
    once = with_huge_pages({})
    assert with_huge_pages(once) == once


def test_the_images_say_the_same() -> None:
    said = re.findall(r"^ENV (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    pairs = dict(pair.split("=", 1) for line in said for pair in line.split())
    assert {name: pairs.get(name) for name in (TUNABLES, PYTHON)} == with_huge_pages({})


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text() or glibc_version() < (2, 35),
    reason="this system has no transparent huge pages",
)
def test_objects_of_a_process_started_so_are_on_huge_pages() -> None:
    environ = with_huge_pages({k: v for k, v in os.environ.items() if k not in (TUNABLES, PYTHON)})
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    # A million objects take 32 MB. The kernel may be short of whole huge pages, but not of all.
    assert int(ran.stdout) >= 8 * 1024
