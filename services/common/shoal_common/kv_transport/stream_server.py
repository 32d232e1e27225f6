"""Serves live exports, and calls that must be fast, as a byte stream."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from shoal_common.kv_transport.exports import ExportTable


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A unary method that the stream serves beside gRPC, for its lower latency: the same handler, the same meaning.

    request_type   protobuf class of the request
    handler        runs on the event loop that started the server; a MeshError becomes the caller's, as by gRPC
    """

    request_type: type[Message]
    handler: Callable[[Any], Awaitable[Message]]


class StreamServer:
    """Threads with blocking sockets, one per connection and `max_connections` at most; more are closed at once.

    A puller names an export by its unguessable id. Who does not read what was asked for is cut: a send has
    `io_timeout_s` plus the time that its bytes take at 10 MB/s. Everything sent lies in the arena and is not copied.
    """

    def __init__(
        self,
        exports: ExportTable,
        *,
        listen_address: str,
        calls: Mapping[str, StreamCall] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_connections: int = 256,
        io_timeout_s: float = 5.0,
    ) -> None:
        """listen_address   host:port; port 0 picks one
        calls            by name, e.g. {"Acquire": StreamCall(pb.AcquireRequest, acquire)}
        ssl_context      of a server, with the mesh's CA and client certificates required; None: plain
        """
        raise NotImplementedError

    @property
    def address(self) -> str:
        """ ":port" once started (the host is the one that a puller called already); empty before and after."""
        raise NotImplementedError

    def start(self) -> None:
        """Listen and serve. Called on the event loop that runs the handlers. Raises AddressInUse."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening, cut every connection and wait for its threads. Before the arena is closed."""
        raise NotImplementedError
