"""The environment in which a service keeps what it allocates on huge pages.

A service that wakes up for a step of a few hundred microseconds pays for what it has to find again: on 4 KiB pages
mostly page walks, which a virtual machine makes twice. glibc asks the kernel for pages of 2 MiB if a tunable says so
(glibc 2.35 and later), and Python's objects lie there if Python leaves them to glibc: its own arenas are too small.
Both are read at a process's start, so whoever starts it has to say it. Where the kernel gives no such pages
(/sys/kernel/mm/transparent_hugepage/enabled is "never"), nothing is gained.
"""

from __future__ import annotations

from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
PYTHON = "PYTHONMALLOC"
_TUNABLE = "glibc.malloc.hugetlb"


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` and what a service needs to be started on huge pages. What it says of either already stands."""
    tunables = environ.get(TUNABLES, "")
    if f"{_TUNABLE}=" not in tunables:
        tunables = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    return {PYTHON: "malloc", **environ, TUNABLES: tunables}
