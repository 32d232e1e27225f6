"""Bytes in any of the forms that Python has for them."""

from typing import TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview


def address_of(memory: Buffer) -> int:
    """Where it lies in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
