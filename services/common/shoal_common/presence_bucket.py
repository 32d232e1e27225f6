"""The presence bucket: a JetStream KV in memory whose keys live three seconds."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType

from shoal_common import subjects
from shoal_common.bus import Bus
from shoal_common.errors import Unavailable
from shoal_common.presence import LAPSE_S

_TIMEOUT_S = 2.0
_MAX_VALUE_BYTES = 64 * 1024
_MAX_BUCKET_BYTES = 64 * 1024 * 1024
_OPERATION = "KV-Operation"
_FAILURES = (nats.errors.Error, TimeoutError, OSError)


class PresenceBucket:
    """Access to the bucket of one mesh over one bus. Whoever finds the bucket missing creates it."""

    def __init__(self, bus: Bus, mesh: str) -> None:
        self._bus = bus
        self._bucket = subjects.presence_bucket(mesh)
        self._prefix = f"$KV.{self._bucket}."
        self._is_known_to_exist = False

    @property
    def subject(self) -> str:
        """Every write to the bucket is a message here; core subscribers see it live."""
        return self._prefix + ">"

    def key(self, subject: str) -> str:
        """The instance id behind a message of `subject`."""
        return subject.removeprefix(self._prefix)

    @staticmethod
    def is_goodbye(headers: dict[str, str]) -> bool:
        """True for a delete or purge marker."""
        return _OPERATION in headers

    def doubt(self) -> None:
        """Look again whether the bucket exists before the next write: after a reconnect it may be gone."""
        self._is_known_to_exist = False

    async def put(self, instance_id: str, value: bytes) -> None:
        """Write one entry; it lives LAPSE_S. Creates the bucket if it is missing. Raises Unavailable."""
        try:
            if not self._is_known_to_exist:
                # Not left to the write's own failure: where readers subscribe to the subject and no stream does,
                # a write finds listeners but no answer, and only times out.
                await self._create()
                self._is_known_to_exist = True
            await self._jetstream().publish(self._prefix + instance_id, value, msg_ttl=LAPSE_S)
        except _FAILURES as error:
            self.doubt()
            raise _unavailable(error) from error

    async def say_goodbye(self, instance_id: str) -> None:
        """Remove one entry, so that readers need not wait for the lapse. Raises Unavailable."""
        try:
            # The marker itself goes the way of the entries, or the bucket would keep one per process ever started.
            await self._jetstream().publish(
                self._prefix + instance_id, b"", headers={_OPERATION: "DEL"}, msg_ttl=LAPSE_S
            )
        except _FAILURES as error:
            raise _unavailable(error) from error

    async def read_all(self) -> dict[str, bytes]:
        """All live entries by instance id; none if there is no bucket yet. Raises Unavailable."""
        entries: dict[str, bytes] = {}
        try:
            bucket = await self._jetstream().key_value(self._bucket)
            watcher: Any = await bucket.watchall(ignore_deletes=True)
            try:
                while (entry := await watcher.updates(timeout=_TIMEOUT_S)) is not None:
                    entries[entry.key] = entry.value or b""
            finally:
                await watcher.stop()
        except (nats.js.errors.BucketNotFoundError, nats.js.errors.NotFoundError):
            return {}
        except _FAILURES as error:
            raise _unavailable(error) from error
        return entries

    async def _create(self) -> None:
        config = KeyValueConfig(
            bucket=self._bucket,
            max_value_size=_MAX_VALUE_BYTES,
            max_bytes=_MAX_BUCKET_BYTES,
            storage=StorageType.MEMORY,
        )
        # A bad request: it exists, with the configuration of another version.
        with contextlib.suppress(nats.js.errors.BadRequestError):
            await self._jetstream().create_key_value(config)

    def _jetstream(self) -> JetStreamContext:
        return self._bus.jetstream(timeout_s=_TIMEOUT_S)


def _unavailable(error: BaseException) -> Unavailable:
    what = "timed out" if isinstance(error, TimeoutError | asyncio.TimeoutError) else repr(error)
    return Unavailable(f"the presence bucket cannot be used: {what}", reason="PRESENCE_UNAVAILABLE")
