"""A directory that several machines share (NFS, 3FS, or a plain one).

<root>/<first two digits of the hash>/<kv_id>,<numerics_id>,<tenant tag>/<kind>-<hash>: values appear by rename, so that
nobody sees half of one. Each of the 256 folders keeps itself below its share of the bound; hashes spread evenly.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shoal_common.errors import MeshError
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.core.flush_epochs import Filter, FlushEpochs
from shoal_kv_cache.tiers.remote.backend import Value
from shoal_kv_cache.tiers.remote.blocking import BlockingCalls
from shoal_kv_cache.tiers.remote.errors import RemoteFull, RemoteUnavailable
from shoal_kv_cache.tiers.remote.names import Name, Pattern, group_parts

T = TypeVar("T")

_FOLDERS = 256
_THREADS = 8
_MAX_CALLS = 64
_CHECK_EVERY = 32
"""A folder is measured each time that one part in so many of its share was written to it."""
_TEMPORARY, _TRASH = ".new-", ".trash-"
_ABANDONED_S = 3600.0


class DirectoryBackend:
    """Values as files. The root must be there: an absent one is a share that is not mounted, and is not made.

    No decision uses this machine's clock; ages are compared by what the file system says of two files.
    """

    def __init__(self, root: Path, *, capacity_bytes: int | None = None) -> None:
        """capacity_bytes: kept about, oldest go first; None: room is the file system's to manage."""
        self._root = root
        self._share_bytes = None if capacity_bytes is None else max(1, capacity_bytes // _FOLDERS)
        self._written: dict[str, int] = {}
        self._appearing, self._flushes = threading.Lock(), FlushEpochs()
        self._calls = BlockingCalls("shared-directory", threads=_THREADS, max_calls=_MAX_CALLS)

    async def get(self, names: Sequence[Name], max_bytes: int) -> list[Buffer | None]:
        """See Backend."""
        return await self._run(lambda: [self._read(name, max_bytes) for name in names])

    async def put(self, values: Sequence[Value]) -> None:
        """See Backend."""

        begun = self._flushes.now

        def work() -> None:
            for value in values:
                self._write(value, begun)

        await self._run(work)

    async def exists(self, names: Sequence[Name]) -> list[bool]:
        """See Backend."""
        return await self._run(lambda: [self._path(name).exists() for name in names])

    async def delete(self, names: Sequence[Name]) -> None:
        """See Backend."""

        def work() -> None:
            for name in names:
                self._path(name).unlink(missing_ok=True)

        await self._run(work)

    async def delete_matching(self, pattern: Pattern) -> int:
        """See Backend. A group's folder is moved away as one, then emptied."""

        def work() -> int:
            # A put that its caller gave up may be under way: nothing of it appears from here on.
            with self._appearing:
                self._flushes.flush(Filter(kv_id=pattern.kv_id, tenant_tag=pattern.tenant_tag))
            return sum(map(self._delete_group, self._groups(pattern)))

        return await self._run(work)

    async def close(self) -> None:
        """See Backend."""
        self._calls.close()

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await self._calls.run(work)
        except OSError as error:
            raise _typed(error) from error

    def _path(self, name: Name) -> Path:
        return self._root / _digits(name.key.block_hash) / ",".join(group_parts(name.group)) / name.leaf

    def _read(self, name: Name, max_bytes: int) -> Buffer | None:
        try:
            with self._path(name).open("rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes > max_bytes:
                    return b""
                data = bytearray(size_bytes)
                view = memoryview(data)
                while view and (count := file.readinto(view)):
                    view = view[count:]
                # Shorter than it said: somebody cuts it, and the checksum will tell.
                return data
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return b""

    def _write(self, value: Value, begun: int) -> None:
        path, group = self._path(value.name), value.name.group
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        descriptor = self._create(temporary)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for part in (value.header, value.payload):
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
            with self._appearing:
                if self._flushes.is_stale(begun, group.kv_id, group.tenant_tag):
                    temporary.unlink()
                    return
                temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._keep_below(path, len(value.header) + len(value.payload))

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for folder in (path.parent.parent, path.parent):
            try:
                return os.open(path, flags, 0o640)
            except FileNotFoundError:
                # One level at a time, and never the root.
                folder.mkdir(exist_ok=True)
        return os.open(path, flags, 0o640)

    def _keep_below(self, path: Path, size_bytes: int) -> None:
        folder = path.parent.parent
        written_bytes = self._written.get(folder.name, 0) + size_bytes
        if self._share_bytes is None or written_bytes * _CHECK_EVERY < self._share_bytes:
            self._written[folder.name] = written_bytes
            return
        self._written[folder.name] = 0
        files = sorted(_files(folder))
        used_bytes = sum(size for _, size, _ in files)
        newest_s = files[-1][0] if files else 0.0
        for changed_s, size, name in files:
            is_temporary = Path(name).name.startswith(_TEMPORARY)
            is_abandoned = newest_s - changed_s > _ABANDONED_S
            is_over = used_bytes > self._share_bytes and name != str(path)
            if is_abandoned if is_temporary else is_over:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                used_bytes -= size

    def _groups(self, pattern: Pattern) -> Iterator[Path]:
        if not self._root.is_dir():
            raise RemoteUnavailable(f"{self._root} is not there")
        for folder in sorted(self._root.iterdir()):
            if not folder.is_dir():
                continue
            for group in sorted(folder.iterdir()):
                parts = group.name.split(",")
                if group.name.startswith(_TRASH):
                    shutil.rmtree(group, ignore_errors=True)
                elif len(parts) == 3 and pattern.matches(parts[0], parts[2]):
                    yield group

    @staticmethod
    def _delete_group(group: Path) -> int:
        trash = group.parent / f"{_TRASH}{uuid.uuid4().hex}"
        try:
            group.rename(trash)
        except FileNotFoundError:
            return 0  # another node flushes, too
        count = sum(not name.startswith(".") for name in os.listdir(trash))
        shutil.rmtree(trash)
        return count


def _digits(block_hash: bytes) -> str:
    """The folder of a hash."""
    return block_hash[:1].hex()


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Time of change, size and path of every file in the groups of a folder."""
    for group in os.scandir(folder):
        if group.is_dir() and not group.name.startswith("."):
            with suppress(FileNotFoundError):
                for file in os.scandir(group.path):
                    with suppress(FileNotFoundError):
                        status = file.stat()
                        yield status.st_mtime, status.st_size, file.path


def _typed(error: OSError) -> MeshError:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    kind = RemoteFull if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else RemoteUnavailable
    return kind(f"shared directory: {error.strerror or error} ({name})", errno=name)
