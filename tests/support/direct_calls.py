"""One service by gRPC and by direct connections, for tests that both mean the same; and peers that break the rules."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from shoal.common.v1 import direct_service_pb2 as pb
from shoal_common.errors import OutOfCapacity
from shoal_common.rpc import Channel, Readiness, RpcServer, Service
from shoal_common.rpc.direct.client import DirectClient
from shoal_common.rpc.direct.frames import FrameKind, FrameReader, pack_frame, pack_hello
from shoal_common.rpc.direct.server import DirectServer
from shoal_common.rpc.status import DETAILS_KEY
from shoal_common.telemetry import Metrics

Act = Callable[[Any, Any], Awaitable[bytes]]
NAME = "test.Probe"
METHODS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "written_stream", "echo_stream")


def identity(payload: bytes) -> bytes:
    """Messages of these tests are bytes."""
    return payload


def parsed(payload: bytes) -> bytes:
    """As protobuf: some bytes are no message."""
    if payload == b"malformed":
        raise DecodeError("Error parsing message")
    return payload


class Probe:
    """One method per arity; each reads what comes, awaits `act` with that and the context, and answers its result."""

    def __init__(self, act: Act) -> None:
        self.act = act

    async def one(self, request: Any, context: Any) -> bytes:
        """One answer."""
        return await self.act(await _all_of(request), context)

    async def many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        """Two answers, by a generator."""
        yield b"first"
        yield await self.act(await _all_of(request), context)

    async def written(self, request: Any, context: Any) -> None:
        """Two answers, written."""
        await context.write(b"first")
        await context.write(await self.act(await _all_of(request), context))

    async def echo(self, request: Any, context: Any) -> None:
        """What comes, at once."""
        async for one in request:
            await context.write(await self.act([one], context))


async def _all_of(request: Any) -> list[bytes]:
    return [one async for one in request] if hasattr(request, "__aiter__") else [request]


def arity_of(method: str) -> str:
    """The method of a channel that calls it."""
    return {"written_stream": "unary_stream", "echo_stream": "stream_stream"}.get(method, method)


def add_probe(servicer: Probe, server: Any) -> None:
    """As generated code adds a service."""
    functions = (servicer.one, servicer.many, servicer.one, servicer.many, servicer.written, servicer.echo)
    handlers = {
        name: getattr(grpc, f"{arity_of(name)}_rpc_method_handler")(
            function, request_deserializer=parsed, response_serializer=identity
        )
        for name, function in zip(METHODS, functions, strict=True)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


async def joined(requests: list[bytes], context: Any) -> bytes:
    """An act: the requests, joined."""
    return b"+".join(requests)


def refusing(error: Exception) -> Act:
    """An act that raises."""

    async def act(requests: list[bytes], context: Any) -> bytes:
        raise error

    return act


@dataclass
class Running:
    """A server and a channel to it."""

    server: RpcServer
    channel: Channel
    metrics: Metrics
    address: str
    stubs: dict[str, Any] = field(default_factory=dict)

    @property
    def direct_server(self) -> DirectServer:
        """The server's end."""
        direct = self.server._direct
        assert direct is not None
        return direct

    @property
    def connection(self) -> DirectClient:
        """The caller's end."""
        connection = self.channel.direct
        assert connection is not None
        return connection

    def stub(self, method: str, deserialize: Callable[[bytes], bytes] = identity) -> Any:
        """A method as a generated stub has it."""
        return getattr(self.channel, arity_of(method))(f"/{NAME}/{method}", identity, deserialize)

    def metric(self, name: str) -> float:
        """A metric without labels."""
        lines = self.metrics.render().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"shoal_{name} ")).split()[1])


@asynccontextmanager
async def running(act: Act = joined, *, is_direct: bool = True, address: str = "127.0.0.1:0") -> AsyncIterator[Running]:
    """The probe, and a channel whose direct connection is up if `is_direct`."""
    metrics = Metrics()
    server = RpcServer(
        [Service(NAME, add_probe, Probe(act))],
        listen_address=address,
        readiness=Readiness(),
        metrics=metrics,
        has_reflection=False,
        has_direct=True,
    )
    listening = await server.start()
    channel = Channel(listening, is_direct=is_direct)
    await channel.settle(5)
    assert (channel.direct is not None) is is_direct
    try:
        yield Running(server, channel, metrics, listening)
    finally:
        await channel.close()
        await server.stop(0)


async def told(awaitable: Awaitable[Any]) -> Any:
    """What a caller is told: the value, or what can be compared of the error."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        trailing: Any = error.trailing_metadata() or ()
        details = [value for key, value in trailing if key == DETAILS_KEY]
        return (error.code(), error.details(), details)
    except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
        return type(error)


async def listed(call: Any) -> list[bytes]:
    """All answers of a stream."""
    return [one async for one in call]


def out_of_capacity() -> OutOfCapacity:
    """An error with all that travels: a reason, metadata, a delay."""
    return OutOfCapacity("3 blocks wanted, 1 free", retry_after_s=1.5, wanted=3, free=1)


class RawCaller:
    """Speaks frames to a server by a plain stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames = FrameReader()
        self._frames.open_up()
        self._heard: list[tuple[int, int, bytes]] = []

    @classmethod
    async def to(cls, server: DirectServer, *, key: bytes | None = None) -> RawCaller:
        """Connected, and greeted with the server's key or another."""
        raw = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        raw.send(FrameKind.HELLO, 0, pack_hello(server.key if key is None else key))
        return raw

    def send(self, kind: FrameKind, call_id: int, payload: bytes = b"") -> None:
        """One frame."""
        self.writer.write(pack_frame(kind, call_id, payload))

    async def frame(self) -> tuple[int, int, bytes] | None:
        """The next frame; None once the server has hung up."""
        while not self._heard:
            try:
                async with asyncio.timeout(10):
                    data = await self.reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._heard.extend(self._frames.feed(data))
        return self._heard.pop(0)

    async def hung_up(self) -> None:
        """Wait for the end."""
        while await self.frame() is not None:
            pass

    def close(self) -> None:
        """Gone, without a word."""
        self.writer.transport.abort()


@asynccontextmanager
async def locating(
    answer: Callable[[pb.LocateResponse], pb.LocateResponse | None],
) -> AsyncIterator[tuple[RpcServer, str]]:
    """A server of the probe whose answer to Locate is changed; None: it says UNIMPLEMENTED."""
    from shoal_common.rpc.direct import servicer

    honest = servicer.DirectServicer.Locate

    async def changed(self: Any, request: pb.LocateRequest, context: Any) -> pb.LocateResponse:
        told = answer(await honest(self, request, context))
        if told is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        assert told is not None
        return told

    servicer.DirectServicer.Locate = changed  # type: ignore[method-assign]
    server = RpcServer(
        [Service(NAME, add_probe, Probe(joined))],
        listen_address="127.0.0.1:0",
        readiness=Readiness(),
        metrics=Metrics(),
        has_reflection=False,
        has_direct=True,
    )
    try:
        yield server, await server.start()
    finally:
        servicer.DirectServicer.Locate = honest  # type: ignore[method-assign]
        await server.stop(0)


@contextmanager
def no_complaints() -> Iterator[None]:
    """What asyncio has to complain of fails the test: exceptions that nobody retrieved, callbacks that raise."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert complaints == []
