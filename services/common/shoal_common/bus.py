"""The bus of the mesh: NATS core for what may be lost and rebuilt. Never request data."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from shoal_common.errors import DeadlineExceeded, Unavailable
from shoal_common.telemetry import inject

logger = logging.getLogger(__name__)

OFF = "off"
"""Value of SHOAL_NATS_URL for a process that stands alone."""
_PENDING_BYTES = 2 * 1024 * 1024
_PENDING_MESSAGES = 4096
_CONNECT_TIMEOUT_S = 2
_PING_INTERVAL_S = 20
_FLUSH_TIMEOUT_S = 6 * _PING_INTERVAL_S
"""Longer than the client takes to give a silent connection up."""
# Drawn once per process: a thousand clients must not return to a restarted server in the same instant.
_RECONNECT_WAIT_S = (0.2, 1.0)


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its bytes and headers (trace context). `respond` answers a request, else does nothing."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    respond: Callable[[bytes], Awaitable[None]]


Handler = Callable[[Message], Awaitable[None]]
Callback = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Wish:
    """A subscription as it was asked for; live while connected."""

    subject: str
    handler: Handler
    live: Subscription | None = None


@dataclass(slots=True)
class BusCounters:
    """What was lost, for the metrics. All only grow."""

    dropped: int = 0
    slow_consumer: int = 0
    handler_errors: int = 0
    connects: int = field(default=0)


class Bus:
    """One connection to NATS, kept up in the background. Belongs to the event loop that called `start`.

    Publishing never waits and never fails: while there is no connection, messages are dropped and counted. A bus that
    is off (`Bus.off()`) is always ready, delivers nothing and refuses requests.
    """

    def __init__(self, url: str, *, name: str) -> None:
        self.is_off = url == OFF
        self.counters = BusCounters()
        self._url, self._name = url, name
        self._client: Client | None = None
        self._jetstreams: dict[float, JetStreamContext] = {}
        self._wishes: list[_Wish] = []
        self._on_connect: list[Callback] = []
        self._task: asyncio.Task[None] | None = None
        self._lost_at_s: float | None = None
        self._was_connected = asyncio.Event()
        self._callbacks: set[asyncio.Task[None]] = set()
        self._flush: asyncio.Task[bool] | None = None
        self._is_closing = False

    @classmethod
    def off(cls) -> Bus:
        """The bus of a process that stands alone."""
        return cls(OFF, name="off")

    @property
    def is_connected(self) -> bool:
        """True while messages flow."""
        return self._client is not None and self._client.is_connected

    @property
    def has_connected(self) -> bool:
        """True once NATS was reached since the start, or if the bus is off: the service may be ready."""
        return self.is_off or self._was_connected.is_set()

    def cut_for_s(self, now_s: float) -> float:
        """Seconds since the connection was lost, on the monotonic clock; 0 while connected, off, or never connected."""
        return 0.0 if self._lost_at_s is None else max(0.0, now_s - self._lost_at_s)

    def on_connect(self, callback: Callback) -> None:
        """Call at the first connect and after each reconnect, when the subscriptions stand: announce, re-snapshot."""
        self._on_connect.append(callback)

    async def start(self) -> None:
        """Begin to connect; returns at once. Tries for ever, `close` ends it."""
        if not self.is_off:
            self._task = asyncio.create_task(self._connect())

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the first connection. False if it did not come in time; at once True if the bus is off."""
        if self.is_off:
            return True
        try:
            await asyncio.wait_for(self._was_connected.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Send what is pending if connected, then disconnect."""
        self._is_closing = True
        for task in (self._task, self._flush, *self._callbacks):
            if task is not None:
                task.cancel()
        if self._client is None:
            return
        try:
            if self._client.is_connected:
                await self._client.flush(timeout=1)
        except (nats.errors.Error, TimeoutError, OSError):
            pass  # what was pending may be lost, as everything on the bus
        await self._client.close()

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Send, with the trace context. False if it was dropped because there is no connection or it is overfull."""
        if self.is_off:
            return False
        client = self._client
        if client is None or not client.is_connected:
            self.counters.dropped += 1
            return False
        try:
            await client.publish(subject, payload, headers=inject() or None)
        except (nats.errors.Error, OSError):
            self.counters.dropped += 1
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` for each message of `subject` (wildcards allowed), one after another, across reconnects.

        May be called before there is a connection. At most 4,096 messages and 2 MiB wait; what comes on top is
        dropped and counted as slow_consumer. An error of a handler is logged and counted, the next message comes.
        """
        wish = _Wish(subject, handler)
        self._wishes.append(wish)
        if self.is_connected:
            await self._subscribe(wish)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask and return the answer. Raises Unavailable (nobody there, no connection) or DeadlineExceeded."""
        client = self._client
        if client is None or not client.is_connected:
            raise Unavailable("no connection to NATS", reason="BUS_DISCONNECTED", subject=subject)
        try:
            answer = await client.request(subject, payload, timeout=timeout_s, headers=inject() or None)
        except nats.errors.NoRespondersError as error:
            raise Unavailable(f"nobody answers on {subject}", reason="NO_RESPONDER", subject=subject) from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise DeadlineExceeded(
                f"no answer on {subject} in {timeout_s} s", subject=subject, timeout_s=timeout_s
            ) from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS failed: {error}", reason="BUS_DISCONNECTED", subject=subject) from error
        return answer.data

    async def ping(self, *, timeout_s: float) -> bool:
        """True if the server answered: then what it sent before has arrived too."""
        client = self._client
        if client is None or not client.is_connected:
            return False
        give_up_s = time.monotonic() + timeout_s
        # A flush outlives the call that began it: the client's read loop dies of an answer to one that was given up.
        if self._flush is not None and not self._flush.done():
            done, _ = await asyncio.wait({self._flush}, timeout=timeout_s)
            if not done:
                return False
        flush = self._flush = asyncio.create_task(_flushed(client))
        done, _ = await asyncio.wait({flush}, timeout=max(0.0, give_up_s - time.monotonic()))
        return bool(done) and flush.result()

    def jetstream(self, *, timeout_s: float) -> JetStreamContext:
        """JetStream on this connection. Raises Unavailable while there is none."""
        if self._client is None or not self._client.is_connected:
            raise Unavailable("no connection to NATS", reason="BUS_DISCONNECTED")
        found = self._jetstreams.get(timeout_s)
        if found is None:
            found = self._jetstreams[timeout_s] = self._client.jetstream(timeout=timeout_s)
        return found

    async def _connect(self) -> None:
        client = Client()
        self._client = client
        await client.connect(
            self._url,
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            connect_timeout=_CONNECT_TIMEOUT_S,
            reconnect_time_wait=random.uniform(*_RECONNECT_WAIT_S),  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=_PENDING_BYTES,
        )
        for wish in self._wishes:
            await self._subscribe(wish)
        await self._connected()

    async def _subscribe(self, wish: _Wish) -> None:
        client = self._client
        if client is None or wish.live is not None:
            return

        async def deliver(raw: Msg) -> None:
            async def respond(payload: bytes) -> None:
                if raw.reply:
                    await self.publish(raw.reply, payload)

            try:
                await wish.handler(Message(raw.subject, raw.data, raw.headers or {}, respond))
            except Exception as error:
                self.counters.handler_errors += 1
                logger.error("handler of a bus message failed", extra={"subject": raw.subject}, exc_info=error)

        wish.live = await client.subscribe(
            wish.subject, cb=deliver, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
        )

    async def _connected(self) -> None:
        self.counters.connects += 1
        self._lost_at_s = None
        # Nobody answers what was asked on the connection before.
        self._flush = None
        self._was_connected.set()
        logger.info("connected to NATS", extra={"connects": self.counters.connects})
        for callback in self._on_connect:
            task = asyncio.get_running_loop().create_task(_guarded(callback))
            self._callbacks.add(task)
            task.add_done_callback(self._callbacks.discard)

    async def _on_reconnect(self) -> None:
        await self._connected()

    async def _on_disconnect(self) -> None:
        if self._was_connected.is_set() and self._lost_at_s is None and not self._is_closing:
            self._lost_at_s = time.monotonic()
            logger.warning("connection to NATS lost, last view is kept")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer += 1
            if self.counters.slow_consumer == 1:
                logger.warning("bus messages dropped: consumer too slow", extra={"subject": error.subject})
        else:
            # Every failed try to reach the server ends here.
            logger.debug("NATS error", extra={"error": repr(error)})


async def _flushed(client: Client) -> bool:
    try:
        await client.flush(timeout=_FLUSH_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError, OSError):
        return False
    return True


async def _guarded(callback: Callback) -> None:
    try:
        await callback()
    except Exception as error:
        logger.error("callback after a connect failed", exc_info=error)
