"""Connections whose two ends are one host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def unpace(connected: socket.socket) -> None:
    """Send at once where no network lies between: both ends have one address. Others keep what the host has set.

    Algorithms that pace (BBR) measure a loopback as slow as they send, and hold large answers back: three times slower.
    """
    with contextlib.suppress(OSError):
        if connected.getpeername()[0] == connected.getsockname()[0]:
            # Every kernel has it, and every user may choose it.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def is_of_our_user(connected: socket.socket) -> bool:
    """Whether the other end of a unix socket is a process of this one's user."""
    _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
