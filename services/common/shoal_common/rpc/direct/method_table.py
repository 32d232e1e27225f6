"""The methods that generated code adds to a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

    Handler = grpc.RpcMethodHandler[Any, Any]


class MethodTable:
    """Stands where generated code expects a server, and keeps the methods that it adds."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Those of a whole service, by a function; the same come by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """The methods of one service."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
