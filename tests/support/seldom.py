"""Cases of a grid that the everyday suite leaves to `make test-long`."""

from __future__ import annotations

from typing import Any

import pytest


def seldom(*cases: Any) -> list[Any]:
    """Parameter sets marked `long`, to stand beside everyday ones in a `parametrize`; a tuple is one set of values."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long) for one in cases]
