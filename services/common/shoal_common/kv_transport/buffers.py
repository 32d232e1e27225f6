"""Bytes in any of the forms that Python has for them."""

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
