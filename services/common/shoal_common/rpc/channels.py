"""Channels to other instances: keepalive, a deadline on every call, trace and request id in the metadata."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import grpc

from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc.server import MAX_MESSAGE_BYTES
from shoal_common.rpc.status import has_error_info
from shoal_common.telemetry import inject

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A lost peer is noticed in 15 s instead of TCP's quarter of an hour, also while no call runs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own first wait is 1 s and grows to two minutes; instances come back faster than that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Retries are the callers', by code and reason; the transport's would add to them unseen.
    ("grpc.enable_retries", 0),
    # Channels to one address would share a connection, and a rebuilt one get the broken one back.
    ("grpc.use_local_subchannel_pool", 1),
)
_TRANSPORT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})
_RETIRED_GRACE_S = 30.0


class _Method:
    """One method of a channel: adds metadata and insists on a deadline, then is the plain gRPC call."""

    __slots__ = ("_inner", "_name")

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        if timeout is None:
            raise ValueError(f"{self._name} was called without a deadline (math.inf for a stream that has beats)")
        headers = list(metadata or ())
        headers += inject().items()
        if request_id.get():
            headers.append((REQUEST_ID_KEY, request_id.get()))
        seconds = None if math.isinf(timeout) else timeout
        if request is None:
            return self._inner(timeout=seconds, metadata=headers, **more)
        return self._inner(request, timeout=seconds, metadata=headers, **more)


class Channel:
    """A grpc.aio channel for generated stubs: `KvCacheServiceStub(channel)`. Every call needs `timeout=` in seconds."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._inner = grpc.aio.insecure_channel(address, options=list(_OPTIONS))

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(method, self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(method, self._inner.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(method, self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(method, self._inner.stream_stream(method, *args, **kwargs))

    def as_grpc(self) -> grpc.aio.Channel:
        """This channel under the type that generated stubs take."""
        return cast(grpc.aio.Channel, self)

    async def close(self, grace_s: float | None = None) -> None:
        """Close; calls still running after `grace_s` are cancelled (at once if None)."""
        await self._inner.close(grace_s)


class Channels:
    """One channel per address, made on first use. Invariant: an address has at most one channel that is handed out.

    Belongs to one event loop. The owner calls `rebuild` when `is_transport_failure` says so, and `drop` when an
    instance is gone for good.
    """

    def __init__(self) -> None:
        self._live: dict[str, Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> Channel:
        """The channel to `address`."""
        channel = self._live.get(address)
        if channel is None:
            channel = self._live[address] = Channel(address)
        return channel

    def rebuild(self, broken: Channel) -> Channel:
        """A fresh channel in place of `broken`; calls that still run on that one have 30 s to end.

        If it was replaced already, the newer one: many callers may see one breakage.
        """
        if self._live.get(broken.address) is broken:
            self.drop(broken.address)
        return self.get(broken.address)

    def drop(self, address: str) -> None:
        """Forget the channel to `address` and close it once its calls have ended, after 30 s at the latest."""
        channel = self._live.pop(address, None)
        if channel is not None:
            task = asyncio.get_running_loop().create_task(channel.close(_RETIRED_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all at once; their calls are cancelled."""
        live, self._live = list(self._live.values()), {}
        for channel in live:
            await channel.close()
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)


def is_transport_failure(error: grpc.RpcError) -> bool:
    """True if the connection failed rather than the method: a dead one may also show as UNKNOWN or CANCELLED."""
    return error.code() in _TRANSPORT_CODES and not has_error_info(error)
