"""How many rows the row independence of a device kernel is tried on: few in the interpreter, which is slow."""

from __future__ import annotations

from support.on_device import HAS_DEVICE

ROWS = 70 if HAS_DEVICE else 7
SIZES_ALONE = (1, 2, 3, 4, 5, 6) if HAS_DEVICE else (2,)
