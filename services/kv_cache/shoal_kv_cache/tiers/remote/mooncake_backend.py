"""A Mooncake store. An optional extra: nothing of it is imported before a store is opened.

Room is the store's to manage: it evicts by itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from shoal_common.errors import MeshError, Unimplemented
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.tiers.remote.backend import Value
from shoal_kv_cache.tiers.remote.blocking import BlockingCalls
from shoal_kv_cache.tiers.remote.errors import RemoteFull, RemoteUnavailable
from shoal_kv_cache.tiers.remote.names import PREFIX, Name, Pattern

T = TypeVar("T")

_THREADS = 2
_MAX_CALLS = 64
_BATCH_BYTES = 16 << 20
_NO_SPACE = -200
_MISSING = -704
_PRESENT = -705
_CLOSE_S = 2.0


class MooncakeBackend:
    """Values as objects under Name.text. The client library blocks, and is set up at the first call."""

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        hostname: str = "127.0.0.1",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int = 0,
        buffer_bytes: int = 256 << 20,
    ) -> None:
        """segment_bytes: memory of this node that the store may use. Raises Unimplemented without the extra."""
        self._store_class = load_store_class()
        self._setup = (hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
        self._store: Any = None
        self._setting_up = threading.Lock()
        self._calls = BlockingCalls("mooncake", threads=_THREADS, max_calls=_MAX_CALLS)

    async def get(self, names: Sequence[Name], max_bytes: int) -> list[Buffer | None]:
        """See Backend. An absent object and a failed read look alike to the library, so it is asked twice."""
        texts = [name.text for name in names]
        step = max(1, _BATCH_BYTES // max_bytes)

        def work(store: Any) -> list[Buffer | None]:
            found: list[Buffer | None] = []
            for begin in range(0, len(texts), step):
                batch = texts[begin : begin + step]
                is_there = _exist(store, batch)
                values = iter(store.get_batch([text for text, there in zip(batch, is_there, strict=True) if there]))
                for there in is_there:
                    value = next(values) if there else b""
                    found.append((value if len(value) <= max_bytes else b"") if value else None)
            return found

        return await self._run(work)

    async def put(self, values: Sequence[Value]) -> None:
        """See Backend."""

        def work(store: Any) -> None:
            for value in values:
                _check(store.put_parts(value.name.text, value.header, value.payload), _PRESENT)

        await self._run(work)

    async def exists(self, names: Sequence[Name]) -> list[bool]:
        """See Backend."""
        texts = [name.text for name in names]
        return await self._run(lambda store: _exist(store, texts))

    async def delete(self, names: Sequence[Name]) -> None:
        """See Backend."""
        texts = [name.text for name in names]

        def work(store: Any) -> None:
            for code in store.batch_remove(texts, True):
                _check(code, _MISSING)

        await self._run(work)

    async def delete_matching(self, pattern: Pattern) -> int:
        """See Backend."""
        kv_part, tag = pattern.parts
        # Names have no character but % and - that a regular expression could mistake, and neither means anything alone.
        regex = f"^{PREFIX}:{kv_part or '[^:]*'}:[^:]*:{tag or '[^:]*'}:.*$"

        def work(store: Any) -> int:
            count = int(store.remove_by_regex(regex, True))
            _check(min(count, 0))
            return count

        return await self._run(work)

    async def close(self) -> None:
        """See Backend. The library's own close may take seconds without a master: it is not waited for."""
        store, self._store = self._store, None
        if store is not None:
            with suppress(TimeoutError, MeshError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._calls.run(store.close)
        self._calls.close()

    async def _run(self, work: Callable[[Any], T]) -> T:
        try:
            return await self._calls.run(lambda: work(self._opened()))
        except (RuntimeError, ValueError) as error:
            raise RemoteUnavailable(f"mooncake: {error}") from error

    def _opened(self) -> Any:
        with self._setting_up:
            if self._store is None:
                store = self._store_class()
                code = store.setup(*self._setup)
                if code:
                    raise RemoteUnavailable(f"mooncake: setup failed with {code}", code=code)
                self._store = store
            return self._store


def load_store_class() -> Callable[[], Any]:
    """The client library's class. Raises Unimplemented, saying what is missing."""
    try:
        _load_cuda_runtime()
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise Unimplemented(f"the mooncake extra cannot be used: {error}", reason="MOONCAKE_MISSING") from error
    return MooncakeDistributedStore  # type: ignore[no-any-return]


def _load_cuda_runtime() -> None:
    """The library links libcudart even where no GPU is; the wheel that has it does not put it on the loader's path."""
    # Found from its parent, which may be missing: then the system has the library, or the import says that it has not.
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_runtime")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted(Path(folder).glob("lib/libcudart.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _exist(store: Any, texts: Sequence[str]) -> list[bool]:
    codes = store.batch_is_exist(list(texts))
    for code in codes:
        _check(min(code, 0))
    return [code == 1 for code in codes]


def _check(code: int, *fine: int) -> None:
    if code >= 0 or code in fine:
        return
    if code == _NO_SPACE:
        raise RemoteFull(f"mooncake: no room ({code})", code=code)
    raise RemoteUnavailable(f"mooncake: error {code}", code=code)
