"""One pull as a conversation: what to send and where to receive, whoever moves the bytes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from google.rpc import status_pb2

from shoal_common.errors import DataLoss, MeshError
from shoal_common.kv_transport.stream_frames import (
    HEADER_BYTES,
    DataHead,
    FrameKind,
    Pull,
    StreamBroken,
    check_body,
    pack_frame,
    unpack_header,
)
from shoal_common.kv_transport.wanted import Wanted
from shoal_common.rpc.status import from_status

Steps: TypeAlias = "Generator[bytes | memoryview, int, None]"
"""Yields bytes to send, or memory to receive into and then is told how many bytes came, 0 at the end of the stream."""


class HolderRefused(Exception):
    """The holder answered with an error; the connection goes on."""

    def __init__(self, error: MeshError) -> None:
        super().__init__(error.message)
        self.error = error


class StreamPull:
    """Asks for everything and takes it in, checked; leaves the connection at the end of the answer."""

    def __init__(self, address: str, export_id: str, wanted: Sequence[Wanted], memory: memoryview) -> None:
        """memory: the destination of `wanted`."""
        self.address, self.export_id, self.wanted, self.memory = address, export_id, wanted, memory

    def steps(self) -> Steps:
        """The whole of it. Raises HolderRefused, StreamBroken, DataLoss, ChecksumMismatch."""
        ranges = tuple((one.first_payload_id, one.count) for one in self.wanted)
        yield pack_frame(FrameKind.PULL, Pull(self.export_id, ranges).pack())
        for one in self.wanted:
            index = 0
            while index < one.count:
                head = yield from _data_head()
                expected = (one.first_payload_id + index, one.size_bytes)
                is_due = (head.first_payload_id, head.size_bytes) == expected
                if not is_due or not 0 < head.count <= one.count - index:
                    raise DataLoss(f"{head} came for payload {expected[0]}", reason="SHORT_PAYLOAD", got=head)
                yield from self._receive(one, index, index + head.count)
                index += head.count

    def _receive(self, one: Wanted, first: int, end: int) -> Steps:
        if one.stride != one.size_bytes:
            for index in range(first, end):
                begin = one.begin + index * one.stride
                yield from _fill(self.memory[begin : begin + one.size_bytes])
                one.verify(self.memory, index, index + 1)
            return
        span = self.memory[one.begin + first * one.stride : one.begin + end * one.stride]
        done, checked = 0, first
        while done < span.nbytes:
            count = yield span[done:]
            if not count:
                raise StreamBroken(f"the stream ended {span.nbytes - done} bytes early")
            done += count
            # While these are in the cache of the core, and the next ones on their way.
            whole = first + done // one.stride
            one.verify(self.memory, checked, whole)
            checked = whole


def _fill(view: memoryview) -> Steps:
    done = 0
    while done < view.nbytes:
        count = yield view[done:]
        if not count:
            raise StreamBroken(f"the stream ended {view.nbytes - done} bytes early")
        done += count


def _data_head() -> Generator[bytes | memoryview, int, DataHead]:
    header = bytearray(HEADER_BYTES)
    yield from _fill(memoryview(header))
    kind, size, checksum = unpack_header(header)
    body = bytearray(size)
    yield from _fill(memoryview(body))
    check_body(body, checksum)
    if kind is FrameKind.ERROR:
        raise HolderRefused(from_status(status_pb2.Status.FromString(bytes(body))))
    if kind is not FrameKind.DATA:
        raise StreamBroken(f"{kind.name} came where data was due")
    return DataHead.unpack(bytes(body))
