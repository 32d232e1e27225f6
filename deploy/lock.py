"""Writes constraints.txt, or the file named: the exact versions of what is installed in the running environment."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "constraints.txt"
# The environment's own tools.
_SKIPPED = {"shoal", "pip", "setuptools"}
_HEADER = (
    "# Exact versions for images and CI. Written by `make lock`; Python 3.11 installs torch's CPU build from these.\n"
)


def pins() -> list[str]:
    """`name==version` of each installed distribution, sorted; local version parts (+cpu) are left out."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in _SKIPPED and not name.startswith("nvidia-"):
            found[name] = distribution.version.partition("+")[0]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(_HEADER + "\n".join(pins()) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(pins())} versions")
