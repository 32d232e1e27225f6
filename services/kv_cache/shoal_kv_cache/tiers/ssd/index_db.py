"""The index in LMDB: what the segment files had at the last checkpoint. It saves reading them; it decides nothing.

Anything wrong with it is found out (IndexDamaged), and then it is thrown away and made again from the files.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash
from shoal_common.kv_transport.buffers import Buffer

from shoal_kv_cache.tiers.ssd.layout import FILE_ID_BYTES, PAGE_BITS, FileHeader
from shoal_kv_cache.tiers.ssd.page_map import PageMap

VERSION = b"2"
_LOCATION = struct.Struct(">Q")
_END = struct.Struct("<I")
_CHECKSUM_BYTES = 8
_SUSPECT = "suspect"


class IndexDamaged(Exception):
    """The index cannot be used."""


class IndexedFile(NamedTuple):
    """What the index says of a segment file."""

    file_id: bytes
    indexed_end: int
    pages: PageMap


class IndexDb:
    """Headers of batches by location, page maps by file. One thread at a time writes; values are checksummed.

    One of another version counts as damaged.
    """

    def __init__(self, path: Path, *, map_bytes: int, is_synced: bool) -> None:
        """Opens it, made if missing. Raises IndexDamaged, and OSError where it can be neither made nor read."""
        self._path = path
        self._check_size(path / "data.mdb")
        try:
            self._env = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=2, sync=is_synced, readahead=False, create=True, mode=0o600
            )
            self._check_size(path / "data.mdb")
            self._check_version()
            self._batches = self._env.open_db(b"batches")
            self._files = self._env.open_db(b"files")
        except lmdb.Error as error:
            raise IndexDamaged(str(error)) from error

    @staticmethod
    def discard(path: Path) -> None:
        """Deletes it. Raises OSError."""
        if path.exists():
            shutil.rmtree(path)

    @staticmethod
    def attempt(path: Path) -> bool:
        """Notes that the index is about to be read; False if two attempts ended the process before `trusted`.

        A damaged page of a mapped file can end a process with a signal: that must not happen at every start.
        """
        suspect = path / _SUSPECT
        count = suspect.stat().st_size if suspect.exists() else 0
        if count < 2:
            path.mkdir(parents=True, exist_ok=True)
            suspect.write_bytes(bytes(count + 1))
        return count < 2

    def trusted(self) -> None:
        """All of it was read."""
        (self._path / _SUSPECT).unlink(missing_ok=True)

    def files(self) -> dict[int, IndexedFile]:
        """Every file that it knows of. Raises IndexDamaged."""
        found = {}
        with self._reading() as txn, txn.cursor(self._files) as cursor:
            for key, value in cursor:
                data = _opened(key, value)
                (end,) = _END.unpack_from(data, FILE_ID_BYTES)
                try:
                    pages = PageMap.from_bytes(zlib.decompress(data[FILE_ID_BYTES + _END.size :]))
                except (zlib.error, ValueError) as error:
                    raise IndexDamaged(str(error)) from error
                found[_number(key)] = IndexedFile(data[:FILE_ID_BYTES], end, pages)
        return found

    def batches(self) -> Iterator[tuple[int, bytes]]:
        """Header of every batch of records by location, ascending, with its own checksum. Raises IndexDamaged."""
        with self._reading() as txn, txn.cursor(self._batches) as cursor:
            for key, value in cursor:
                yield _number(key), bytes(value)

    def checkpoint(
        self,
        batches: Mapping[int, bytes],
        files: Mapping[FileHeader, tuple[int, bytes]],
        gone: Sequence[int],
    ) -> None:
        """Adds headers of batches by location, replaces end and page map of `files`, forgets `gone`: all or nothing.

        Raises IndexDamaged, when it is full or the disk is, too.
        """
        try:
            with self._env.begin(write=True) as txn:
                for number in gone:
                    self._forget(txn, number)
                with txn.cursor(self._batches) as cursor:
                    cursor.putmulti((_LOCATION.pack(location), header) for location, header in sorted(batches.items()))
                for header, (end, pages) in files.items():
                    value = b"".join((header.file_id, _END.pack(end), zlib.compress(pages, 1)))
                    txn.put(*_sealed(_LOCATION.pack(header.number), value), db=self._files)
        except (lmdb.Error, OSError) as error:
            raise IndexDamaged(str(error)) from error

    def close(self) -> None:
        """Unmaps it."""
        self._env.close()

    def _forget(self, txn: lmdb.Transaction, number: int) -> None:
        txn.delete(_LOCATION.pack(number), db=self._files)
        with txn.cursor(self._batches) as cursor:
            is_there = cursor.set_range(_LOCATION.pack(number << PAGE_BITS))
            while is_there and _number(cursor.key()) >> PAGE_BITS == number:
                is_there = cursor.delete()

    def _check_version(self) -> None:
        with self._env.begin(write=True) as txn:
            if txn.get(b"version") == VERSION:
                return
            if txn.stat()["entries"]:
                txn.abort()
                self._env.close()
                raise IndexDamaged("it is of another version")
            txn.put(b"version", VERSION)

    def _reading(self) -> _Reading:
        return _Reading(self._env)

    def _check_size(self, path: Path) -> None:
        """A file that is shorter than its own tree would end the process with SIGBUS when it is read."""
        if not path.exists() or path.stat().st_size == 0:
            return
        if path.stat().st_size < _needed_bytes(path):
            raise IndexDamaged("the file is cut")


class _Reading:
    """A read transaction whose errors are IndexDamaged."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    def __enter__(self) -> lmdb.Transaction:
        try:
            self._txn = self._env.begin()
        except lmdb.Error as error:
            raise IndexDamaged(str(error)) from error
        return self._txn

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._txn.abort()
        if isinstance(error, lmdb.Error):
            raise IndexDamaged(str(error)) from error


# Page header of 16 bytes, then MDB_meta: magic, version, address, map size, two MDB_db of 48 bytes, last page, txn id.
_META = struct.Struct("<16xII8xQII40x48xQQ")
_META_MAGIC = 0xBEEFC0DE


def _needed_bytes(path: Path) -> int:
    """How long the file must be by its newest meta page. Raises IndexDamaged if there is none."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if len(head) < _META.size:
        raise IndexDamaged("the file is cut")
    page_bytes = _META.unpack_from(head)[3]
    newest = (-1, 0)
    for offset in (0, page_bytes):
        if len(head) < offset + _META.size:
            raise IndexDamaged("the file is cut")
        magic, _, _, _, _, last_page, txn = _META.unpack_from(head, offset)
        if magic == _META_MAGIC:
            newest = max(newest, (txn, (last_page + 1) * page_bytes))
    if newest[0] < 0:
        raise IndexDamaged("no meta page")
    return newest[1]


def _number(key: Buffer) -> int:
    if len(key) != _LOCATION.size:
        raise IndexDamaged("a key is damaged")
    return int(_LOCATION.unpack(key)[0])


def _sealed(key: bytes, value: bytes) -> tuple[bytes, bytes]:
    return key, value + xxhash.xxh3_64_digest(key + value)


def _opened(key: Buffer, value: Buffer) -> bytes:
    data = bytes(value[:-_CHECKSUM_BYTES])
    if xxhash.xxh3_64_digest(bytes(key) + data) != value[-_CHECKSUM_BYTES:]:
        raise IndexDamaged("a value is damaged")
    return data
