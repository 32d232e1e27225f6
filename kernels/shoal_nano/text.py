"""The text nano reads: CPython's standard library source and the Python documentation (both PSF licence)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_IN = 40  # one file in this many is never trained on
_SKIP_PARTS = {"site-packages", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One document: its name below the source's root, its text, and whether it is kept out of training."""

    name: str
    text: str
    is_held_out: bool


def read_text(stdlib: Path, docs: Path) -> Iterator[TextFile]:
    """Every usable file of both sources in a fixed order.

    stdlib  the `lib/python3.11` folder of a CPython 3.11 installation
    docs    the unpacked `python3.11-doc` package's `html/_sources` folder
    raises  FileNotFoundError if a folder is missing
    """
    for root, pattern in ((stdlib, "*.py"), (docs, "*.rst.txt")):
        if not root.is_dir():
            raise FileNotFoundError(f"no such folder: {root}")
        for path in sorted(root.rglob(pattern)):
            relative = path.relative_to(root)
            if _SKIP_PARTS & set(relative.parts):
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 200:
                continue
            held_out = zlib.crc32(str(relative).encode()) % HELD_OUT_IN == 0
            yield TextFile(name=str(relative), text=text, is_held_out=held_out)
