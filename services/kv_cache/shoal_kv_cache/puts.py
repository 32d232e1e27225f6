"""Puts in flight: announced, filled, then visible at once, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.errors import ChecksumMismatch, InvalidArgument, MeshError

from shoal_kv_cache.core.entries import Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.index import Outcome
from shoal_kv_cache.core.leases import TooManyLeases
from shoal_kv_cache.fills import Fill
from shoal_kv_cache.payload_checks import check_begin, malformed
from shoal_kv_cache.store import KIND, Store

_CHECK_BESIDE_BYTES = 1 << 20
"""Above this the checksums of a put are computed beside the event loop."""

OnStored = Callable[[Sequence[Entry], bool], Awaitable[None]]
"""Told what a put made visible, and whether it came from a peer, before the put is answered."""


class Puts:
    """The puts of one node. Invariant: an entry of a group is filled by one put at a time; others leave it out, and
    wait for that put at their own commit, since what they bring may stand on it."""

    def __init__(self, store: Store, on_stored: OnStored) -> None:
        self.store = store
        self._on_stored = on_stored
        self._filling: dict[tuple[Group, Key], Put] = {}
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Names a put within this node: what callers choose may come twice."""
        return next(self._numbers)

    def begin(self, begin: pb.PutBegin) -> Put:
        """Raises InvalidArgument (MALFORMED_PAYLOAD) naming the field; OutOfCapacity where nothing can be evicted."""
        check_begin(begin)
        return Put(self, begin)

    def claim(self, put: Put, group: Group, keys: Sequence[Key]) -> tuple[list[int], set[Put]]:
        """Which of these the put has to fill, and the puts that are filling others of them."""
        missing = self.store.index.missing(group, keys)
        wanted: list[int] = []
        others: set[Put] = set()
        for index, (key, is_missing) in enumerate(zip(keys, missing, strict=True)):
            other = self._filling.get((group, key)) if is_missing else None
            if other is not None:
                others.add(other)
            elif is_missing:
                self._filling[group, key] = put
                wanted.append(index)
        return wanted, others - {put}

    def end(self, group: Group, keys: Sequence[Key]) -> None:
        """A put has ended."""
        for key in keys:
            self._filling.pop((group, key), None)

    async def stored(self, entries: Sequence[Entry], is_from_peer: bool) -> None:
        """Passes on what a put made visible."""
        if entries:
            await self._on_stored(entries, is_from_peer)


class Put:
    """One put. Invariant: the slabs it holds are given back unless it is committed."""

    def __init__(self, puts: Puts, begin: pb.PutBegin) -> None:
        self._puts, self._store = puts, puts.store
        self._is_from_peer = begin.is_from_peer
        self._group = Group(begin.kv_id, begin.numerics_id, begin.tenant_tag)
        self._begun = self._store.epochs.now
        self._payload_ids = [payload.payload_id for payload in begin.payloads]
        self._entries = _entries(begin, self._group)
        keys = [entry.key for entry in self._entries]
        self._ended = asyncio.Event()
        self._failure: MeshError | None = None
        self._slabs: dict[int, int] = {}
        self._filled_bytes = 0
        self._wanted, self._others = puts.claim(self, self._group, keys)
        self._pending = list(self._wanted)
        self._fill: Fill | None = None
        self._hold_id = f"\0put {puts.next_number()}"
        try:
            if self._wanted:
                blocks = [entry.size_bytes for entry in self._entries if entry.key.kind is Kind.BLOCK]
                self._store.ram.fit_to(min(blocks or [entry.size_bytes for entry in self._entries]))
                self._allocate()
                self._fill = self._store.fills.begin(begin.offer)
            if self._fill is not None:
                self._pending = []
        except BaseException:
            self.discard()
            raise

    @property
    def wanted(self) -> pb.PutWanted:
        """What is not held yet, in the order in which it must be sent, or where it is to be written."""
        answer = pb.PutWanted(payload_ids=[self._payload_ids[index] for index in self._wanted])
        if self._fill is not None:
            answer.grant.CopyFrom(self._fill.grant)
            answer.fill_number = self._fill.number
            answer.slabs.extend(self._store.ram.arena.slabs_of(self._slabs[index] for index in self._wanted))
        return answer

    def fill(self, data: pb.PutData) -> None:
        """Takes the next bytes. A failure waits for `commit`: a writer in full flow would not hear of it before.

        After one nothing more is kept.
        """
        if self._failure is None:
            try:
                self._take(data)
            except MeshError as error:
                self._failure = error
                self.discard()

    async def commit(self) -> int:
        """Makes everything visible in one step and passes it on; returns how many were new.

        Raises what failed: InvalidArgument out of order or with payloads missing, ChecksumMismatch, OutOfCapacity, and
        under fsync=always what kept it from being durable: then it is visible, and may be lost.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending:
            raise malformed("commit", f"{len(self._pending)} payloads are missing")
        if self._fill is not None and not self._fill.end():
            raise malformed("commit", "the memory is still being written")
        await self._verify()
        for other in self._others:
            await other._ended.wait()
        if self._store.epochs.is_stale(self._begun, self._group.kv_id, self._group.tenant_tag):
            return 0
        self._hold_parents()
        entries = [self._entries[index] for index in self._wanted]
        slabs, self._slabs = [self._slabs[index] for index in self._wanted], {}
        outcomes = self._store.commit(entries, slabs) if entries else []
        self._end()
        stored = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is Outcome.STORED]
        await self._puts.stored(stored, self._is_from_peer)
        return sum(outcome.is_counted for outcome in outcomes)

    def discard(self) -> None:
        """Gives back what was not committed, once nobody writes into it. Safe to repeat."""
        slabs, self._slabs = list(self._slabs.values()), {}
        self._store.fills.free(slabs, self._fill)
        self._end()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._store.release(self._hold_id)
            self._puts.end(self._group, [self._entries[index].key for index in self._wanted])
            self._ended.set()

    def _hold_parents(self) -> None:
        """What the new entries stand on stays while room is made for them."""
        entries = [self._entries[index] for index in self._wanted]
        new = {entry.key.block_hash for entry in entries if entry.key.kind is Kind.BLOCK}
        old = {one.key.block_hash if one.key.kind is Kind.SNAPSHOT else one.parent_hash for one in entries} - new
        self._store.release(self._hold_id)
        # Without a lease to spare they may go, and what stands on them is not stored.
        with contextlib.suppress(TooManyLeases):
            keys = [Key(Kind.BLOCK, block_hash) for block_hash in old]
            self._store.index.hold(self._hold_id, "", math.inf, self._group, keys)

    def _allocate(self) -> None:
        """All at once: a tenant's quota counts all of it, and what does not fit is refused before it is sent."""
        self._hold_parents()
        sizes = [self._entries[index].size_bytes for index in self._wanted]
        slabs = self._store.allocate(sizes, self._group.tenant_tag)
        self._slabs.update(zip(self._wanted, slabs, strict=True))

    def _take(self, data: pb.PutData) -> None:
        if not self._pending:
            raise malformed("data", "all wanted payloads are sent")
        index = self._pending[0]
        size_bytes = self._entries[index].size_bytes
        end = self._filled_bytes + len(data.data)
        is_next = data.payload_id == self._payload_ids[index] and data.offset == self._filled_bytes
        if not is_next or end > size_bytes:
            raise malformed("data", f"payload {self._payload_ids[index]} goes on at byte {self._filled_bytes}")
        self._store.ram.arena.write(self._slabs[index], self._filled_bytes, data.data)
        self._filled_bytes = end
        if end == size_bytes:
            self._pending.pop(0)
            self._filled_bytes = 0

    async def _verify(self) -> None:
        size_bytes = sum(self._entries[index].size_bytes for index in self._wanted)
        if size_bytes > _CHECK_BESIDE_BYTES:
            damaged = await asyncio.to_thread(self._damaged)
        else:
            damaged = self._damaged()
        if damaged is not None:
            payload_id = self._payload_ids[damaged]
            raise ChecksumMismatch(f"payload {payload_id} is not what its checksum says", payload_id=payload_id)

    def _damaged(self) -> int | None:
        arena = self._store.ram.arena
        for index in self._wanted:
            entry, slab = self._entries[index], self._slabs.get(index)
            if slab is None or arena.checksum(slab, entry.size_bytes) != entry.checksum:
                return index
        return None


def _entries(begin: pb.PutBegin, group: Group) -> list[Entry]:
    forms: dict[Form, Form] = {}
    entries = []
    for payload, parent_hash in zip(begin.payloads, begin.parent_hashes, strict=True):
        form = Form(
            payload.position_end - payload.position_begin, tuple(payload.shape), payload.dtype, payload.size_bytes
        )
        entries.append(
            Entry(
                Key(KIND[payload.kind], payload.block_hash),
                group,
                parent_hash,
                payload.position_end,
                forms.setdefault(form, form),
                payload.checksum,
            )
        )
    return entries


def out_of_order() -> InvalidArgument:
    """A message of a put that cannot come now."""
    return InvalidArgument.at("message", "the order is begin, data, commit")
