"""The KV cache nodes of a mesh, and calls to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc
from shoal.kv_cache.v1.kv_cache_service_pb2_grpc import KvCacheServiceStub
from shoal_common.rpc import Channels, from_rpc_error

from shoal_cli.errors import CliError
from shoal_cli.status import observe

if TYPE_CHECKING:
    # Only the stubs for type checkers tell the asynchronous one apart.
    from shoal.kv_cache.v1.kv_cache_service_pb2_grpc import KvCacheServiceAsyncStub

ROLE = "kv_cache"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one node said: a value, or why there is none."""

    address: str
    value: T | None
    error: str = ""


def live_nodes(addresses: Sequence[str], *, nats_url: str, mesh: str) -> list[str]:
    """The addresses given, or those of all nodes that announce themselves. Raises CliError if there is none."""
    if addresses:
        return list(addresses)
    fleet = asyncio.run(observe(nats_url, mesh))
    found = [presence.address for presence, _ in fleet if presence.role == ROLE]
    if not found:
        raise CliError(f"no kv_cache node lives in mesh {mesh!r}; name one with --node HOST:PORT")
    return found


def ask_all(addresses: Sequence[str], call: Callable[[KvCacheServiceAsyncStub], Awaitable[T]]) -> list[Answer[T]]:
    """The answers of all nodes, in order; `call` gives its own deadline. A node that fails is an answer too."""

    async def ask(channels: Channels, address: str) -> Answer[T]:
        stub = KvCacheServiceStub(channels.get(address).as_grpc())
        try:
            return Answer(address, await call(stub))
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            return Answer(address, None, f"{failure.message} ({failure.reason})")

    async def ask_each() -> list[Answer[T]]:
        channels = Channels()
        try:
            return await asyncio.gather(*(ask(channels, address) for address in addresses))
        finally:
            await channels.close()

    return asyncio.run(ask_each())
