"""Connections whose two ends are one host."""

from __future__ import annotations

import contextlib
import socket


def unpace(connected: socket.socket) -> None:
    """Send at once where no network lies between: both ends have one address. Others keep what the host has set.

    Algorithms that pace (BBR) measure a loopback as slow as they send, and hold large answers back: three times slower.
    """
    with contextlib.suppress(OSError):
        if connected.getpeername()[0] == connected.getsockname()[0]:
            # Every kernel has it, and every user may choose it.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
