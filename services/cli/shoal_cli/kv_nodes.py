"""The KV cache nodes of a mesh, and calls to all of them at once."""

from __future__ import annotations

import asyncio
import re
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
_HOST = re.compile(r"[^\s/:\[\]]+|\[[0-9A-Fa-f:.%]+\]")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one node said: a value, or why there is none."""

    address: str
    value: T | None
    error: str = ""


def live_nodes(addresses: Sequence[str], *, nats_url: str, mesh: str) -> list[str]:
    """The addresses given, each once, or those of all nodes that announce themselves.

    Raises CliError if there is none, or one is not HOST:PORT.
    """
    if addresses:
        for one in addresses:
            host, _, port = one.rpartition(":")
            if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise CliError(f"--node must be HOST:PORT, got {one!r}")
        return list(dict.fromkeys(addresses))
    try:
        fleet = asyncio.run(observe(nats_url, mesh))
    except CliError as error:
        raise CliError(f"{error} Or name a node with --node HOST:PORT") from error
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
