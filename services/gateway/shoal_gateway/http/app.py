"""From a path to its handler; every failure becomes an error body."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanKind
from shoal_common.errors import Internal, MeshError, SlowReader
from shoal_common.telemetry import TRACE_KEYS, TRACER, extract

from shoal_gateway.http.exchange import ClientGone, Exchange, Handler, Receive, Scope, Send
from shoal_gateway.refusals import MethodNotAllowed, NoSuchPath

logger = logging.getLogger(__name__)

_MODEL = "/models/"


class App:
    """The ASGI application. Every path answers with and without /v1 in front.

    routes   path to method to handler; `/models/` takes whatever follows
    """

    def __init__(
        self,
        routes: Mapping[str, Mapping[str, Handler]],
        *,
        max_body_bytes: int,
        read_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        self._routes = routes
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
        with _span(exchange):
            await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)(exchange)
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
        path = exchange.path.removeprefix("/v1")
        if path.startswith(_MODEL) and len(path) > len(_MODEL):
            path = _MODEL
        methods = self._routes.get(path.rstrip("/") if path != _MODEL else path)
        if methods is None:
            raise_path = exchange.path if len(exchange.path) <= 200 else exchange.path[:200] + "..."
            raise NoSuchPath(f"nothing is served at {raise_path}")
        handler = methods.get(exchange.method)
        if handler is None:
            raise MethodNotAllowed(f"{exchange.method} is not served here; {', '.join(sorted(methods))} is")
        return handler

    async def _fail(self, exchange: Exchange, error: MeshError) -> None:
        if not exchange.has_begun:
            await exchange.fail(error)


@contextlib.contextmanager
def _span(exchange: Exchange) -> Iterator[None]:
    """The span of a request that may generate; probes and lists would only fill the traces."""
    if exchange.method != "POST":
        yield
        return
    headers = {name: exchange.header(name.encode()).decode("latin-1") for name in TRACE_KEYS}
    attributes = {"http.request.method": exchange.method, "url.path": exchange.path[:200]}
    with TRACER.start_as_current_span(
        exchange.method, context=extract(headers), kind=SpanKind.SERVER, attributes=attributes
    ):
        yield
