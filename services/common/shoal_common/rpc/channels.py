"""Channels to other instances: keepalive, a deadline on every call, trace and request id in the metadata."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import grpc
from shoal.common.v1 import direct_service_pb2 as pb
from shoal.common.v1.direct_service_pb2_grpc import DirectServiceStub

from shoal_common.request_scope import REQUEST_ID_KEY, request_id
from shoal_common.rpc.direct.client import DirectClient
from shoal_common.rpc.direct.frames import MAX_MESSAGE_BYTES
from shoal_common.rpc.direct.way import DirectWay
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
SETTLE_S = 1.0
"""So long a call that stays waits for a direct connection to be found."""


class _Method:
    """One method of a channel: adds metadata and insists on a deadline, then is a direct call or the plain gRPC one."""

    __slots__ = ("_channel", "_deserialize", "_inner", "_kind", "_name", "_options", "_serialize")

    def __init__(
        self,
        channel: Channel,
        kind: str,
        name: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> None:
        self._channel, self._kind, self._name, self._options = channel, kind, name, options
        self._serialize, self._deserialize = request_serializer, response_deserializer
        self._inner: Any = None

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        if timeout is None:
            raise ValueError(f"{self._name} was called without a deadline (math.inf for a stream that has beats)")
        headers = inject()
        if request_id.get():
            headers[REQUEST_ID_KEY] = request_id.get()
        direct = self._channel.direct
        if direct is not None and not metadata and not more:
            return self._call_directly(direct, request, headers, timeout)
        listed = [*(metadata or ()), *headers.items()]
        if self._inner is None:
            make = getattr(self._channel.inner, self._kind)
            self._inner = make(self._name, self._serialize, self._deserialize, **self._options)
        seconds = None if math.isinf(timeout) else timeout
        if request is None:
            return self._inner(timeout=seconds, metadata=listed, **more)
        return self._inner(request, timeout=seconds, metadata=listed, **more)

    def _call_directly(self, direct: DirectClient, request: Any, headers: dict[str, str], timeout_s: float) -> Any:
        call = direct.open(
            self._name,
            request,
            serialize=self._serialize,
            deserialize=self._deserialize,
            metadata=headers,
            timeout_s=timeout_s,
            takes_one=self._kind.startswith("unary"),
        )
        return call.only_answer() if self._kind.endswith("unary") else call


class Channel:
    """A grpc.aio channel for generated stubs: `KvCacheServiceStub(channel)`. Every call needs `timeout=` in seconds.

    With `is_direct` calls go by a direct connection as soon as there is one, where the server takes them.
    """

    def __init__(self, address: str, *, is_direct: bool = False) -> None:
        self.address = address
        self.inner = grpc.aio.insecure_channel(address, options=list(_OPTIONS))
        self._way = DirectWay(address, self._locate) if is_direct else None

    @property
    def direct(self) -> DirectClient | None:
        """The direct connection, if one is up; looks for one otherwise."""
        return None if self._way is None else self._way.connection()

    async def settle(self, timeout_s: float) -> None:
        """Wait until it is known whether calls go directly. For calls that stay."""
        if self._way is not None:
            await self._way.settle(timeout_s)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(self, "unary_unary", method, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(self, "unary_stream", method, *args, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(self, "stream_unary", method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> _Method:
        """As grpc.aio.Channel."""
        return _Method(self, "stream_stream", method, *args, **kwargs)

    def as_grpc(self) -> grpc.aio.Channel:
        """This channel under the type that generated stubs take."""
        return cast(grpc.aio.Channel, self)

    async def close(self, grace_s: float | None = None) -> None:
        """Close; calls still running after `grace_s` are cancelled (at once if None)."""
        ending = [] if self._way is None else [self._way.close(grace_s or 0.0)]
        await asyncio.gather(*ending, self.inner.close(grace_s))

    async def _locate(self, timeout_s: float) -> pb.LocateResponse:
        stub: Any = DirectServiceStub(self.inner)
        located: pb.LocateResponse = await stub.Locate(pb.LocateRequest(), timeout=timeout_s)
        return located


class Channels:
    """One channel per address, made on first use. Invariant: an address has at most one channel that is handed out.

    Belongs to one event loop. The owner calls `rebuild` when `is_transport_failure` says so, and `drop` when an
    instance is gone for good.
    """

    def __init__(self, *, is_direct: bool = False) -> None:
        """is_direct: see Channel."""
        self._is_direct = is_direct
        self._live: dict[str, Channel] = {}
        self._closing: dict[asyncio.Task[None], Channel] = {}

    def get(self, address: str) -> Channel:
        """The channel to `address`."""
        channel = self._live.get(address)
        if channel is None:
            channel = self._live[address] = Channel(address, is_direct=self._is_direct)
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
            self._closing[task] = channel
            task.add_done_callback(lambda closed: self._closing.pop(closed, None))

    async def close(self) -> None:
        """Close all at once; their calls are cancelled."""
        left = [*self._live.values(), *self._closing.values()]
        closing, self._live = list(self._closing), {}
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        # Those whose end has hardly begun too: a task that is cancelled before its first step does nothing.
        for channel in left:
            await channel.close()


def is_transport_failure(error: grpc.RpcError) -> bool:
    """True if the connection failed rather than the method: a dead one may also show as UNKNOWN or CANCELLED."""
    return error.code() in _TRANSPORT_CODES and not has_error_info(error)
