"""From a path to its handler; every failure becomes an error body."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanKind
from shoal_common.errors import Internal, MeshError, SlowReader
from shoal_common.telemetry import TRACE_KEYS, TRACER, extract, follow, may_record

from shoal_gateway.edge.edge import Edge
from shoal_gateway.edge.keys import secret_of
from shoal_gateway.http.exchange import ClientGone, Exchange, Handler, Receive, Scope, Send
from shoal_gateway.refusals import MethodNotAllowed, NoSuchPath

logger = logging.getLogger(__name__)

_BASES = ("", "/anthropic", "/beta")
"""What may stand in front of a version."""
_OPEN_PATHS = frozenset({"/healthz", "/health", "/live", "/readyz", "/ready", "/openapi.json"})
"""What nobody needs a key for."""
_TRACE_HEADERS = tuple((name, name.encode()) for name in TRACE_KEYS)


class App:
    """The ASGI application. Every path answers with and without /v1, in front or behind the base of another API.

    routes   path to method to handler; a path that ends in `/` takes whatever follows
    edge     asked for the key of whoever comes, on all paths but those of health and the API's description
    """

    def __init__(
        self,
        routes: Mapping[str, Mapping[str, Handler]],
        edge: Edge,
        *,
        max_body_bytes: int,
        read_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        self.routes, self._edge = routes, edge
        self._open_ended = tuple(path for path in routes if path.endswith("/"))
        # What nearly all requests ask for, by the path as it is sent.
        self._exact = {
            path: route for route in routes if not route.endswith("/") for path in (route, _with_version(route))
        }
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s, self._write_timeout_s = read_timeout_s, write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(
            scope,
            receive,
            send,
            max_body_bytes=self._max_body_bytes,
            read_timeout_s=self._read_timeout_s,
            write_timeout_s=self._write_timeout_s,
        )
        if exchange.method != "POST":
            # Probes and lists would only fill the traces.
            await self._serve(exchange)
            return
        headers = {name: exchange.header(key).decode("latin-1") for name, key in _TRACE_HEADERS}
        if not may_record(headers):
            follow(headers)
            await self._serve(exchange)
            return
        attributes = {"http.request.method": exchange.method, "url.path": exchange.path[:200]}
        with TRACER.start_as_current_span(
            exchange.method, context=extract(headers), kind=SpanKind.SERVER, attributes=attributes
        ):
            await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            handler = self._handler(exchange)
            if self._edge.asks_for_keys and exchange.route not in _OPEN_PATHS:
                exchange.key = self._edge.authenticate(_secret(exchange))
            await handler(exchange)
        except ClientGone:
            pass
        except SlowReader as error:
            # What it was sent is unfinished, which is how it can tell.
            logger.info("slow reader cut", extra={"reason": error.reason})
            await exchange.abort()
        except MeshError as error:
            trace.get_current_span().set_attribute("error.type", error.reason)
            await self._fail(exchange, error)
        except Exception as error:
            logger.error("unexpected error in a handler", extra={"path": exchange.path[:200]}, exc_info=error)
            await self._fail(exchange, Internal("unexpected error"))

    def _handler(self, exchange: Exchange) -> Handler:
        exchange.route = self._exact.get(exchange.path) or self._route(exchange.path)
        methods = self.routes.get(exchange.route)
        if methods is None:
            raise_path = exchange.path if len(exchange.path) <= 200 else exchange.path[:200] + "..."
            raise NoSuchPath(f"nothing is served at {raise_path}")
        # As GET, but the body: the server leaves that out.
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)
            is_or_are = "is" if len(allowed) == 1 else "are"
            told = f"{exchange.method[:20]} is not served here; {' and '.join(allowed)} {is_or_are}"
            raise MethodNotAllowed(told, allow=", ".join(allowed))
        return handler

    def _route(self, path: str) -> str:
        path = _without_version(path)
        route = path.rstrip("/")
        if route in self.routes:
            return route
        return next((one for one in self._open_ended if path.startswith(one)), route)

    async def _fail(self, exchange: Exchange, error: MeshError) -> None:
        if not exchange.has_begun:
            await exchange.fail(error)


def _secret(exchange: Exchange) -> bytes:
    return secret_of(*(exchange.header(name).decode("latin-1") for name in (b"authorization", b"x-api-key")))


def _with_version(route: str) -> str:
    base = next(one for one in reversed(_BASES) if route.startswith(f"{one}/"))
    return f"{base}/v1{route[len(base) :]}"


def _without_version(path: str) -> str:
    for base in _BASES:
        if path.startswith(f"{base}/v1/"):
            return base + path[len(base) + len("/v1") :]
    return path
