"""Flips bytes of payloads where they lie: in a node's memory, on its disk, in a store outside of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import redis
from shoal.common.v1 import kv_transport_pb2 as transport_pb
from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file."""

    path: Path
    offset: int
    size_bytes: int

    def read(self) -> bytes:
        """What is there."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size_bytes)

    def flip(self) -> None:
        """Another byte in the middle."""
        at = self.offset + self.size_bytes // 2
        with self.path.open("r+b", buffering=0) as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0x55]))


def in_memory(answer: pb.AcquireResponse, kind: transport_pb.PayloadKind.ValueType, index: int = 0) -> Place:
    """Where the arena of a node has the payload of a kind that is the `index`th of an answer; one slab each."""
    run = next(one for one in answer.runs if one.kind == kind)
    slabs_each = len(run.slabs) // len(run.checksums)
    grant = answer.grant
    offset = grant.first_slab_offset + run.slabs[index * slabs_each] * grant.slab_bytes
    return Place(Path("/dev/shm") / grant.arena_name, offset, min(run.size_bytes, grant.slab_bytes))


def on_disk(directory: Path, payload: bytes) -> Place:
    """Where a disk tier has these bytes."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and (offset := path.read_bytes().find(payload)) >= 0:
            return Place(path, offset, len(payload))
    raise AssertionError(f"nothing under {directory} has these bytes")


def in_shared_folder(directory: Path, leaf: str) -> Place:
    """A value of a shared directory, by the last part of its name."""
    (path,) = directory.rglob(leaf)
    return Place(path, 0, path.stat().st_size)


def in_redis(client: redis.Redis, leaf: str) -> tuple[bytes, bytes]:
    """A value of a redis by the last part of its name: its whole name, and the value."""
    (name,) = client.scan_iter(match=f"*:{leaf}")
    value = client.get(name)
    assert isinstance(value, bytes)
    return name, value


def flip_in_redis(client: redis.Redis, leaf: str) -> None:
    """Another byte at its end."""
    name, value = in_redis(client, leaf)
    client.set(name, value[:-1] + bytes([value[-1] ^ 0x55]))
