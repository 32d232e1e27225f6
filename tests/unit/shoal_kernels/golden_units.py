"""The golden single-function tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

_PATH = Path(__file__).parents[2] / "golden" / "data" / "units.safetensors"


@cache
def _all() -> dict[str, Tensor]:
    return load_file(_PATH)


def golden(name: str) -> Tensor:
    """One tensor of the golden units file."""
    return _all()[name]
