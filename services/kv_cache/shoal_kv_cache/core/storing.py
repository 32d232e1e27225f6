"""Takes entries in: which become visible, which do not, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, SEGMENT_BLOCKS, Entry, Kind
from shoal_kv_cache.core.groups import GroupRecord
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.results import Outcome
from shoal_kv_cache.core.table import NO_PLACE, RAM, SNAPSHOT, SSD, VISIBLE, IndexFull

_SHORTEST_RUN = 8
"""Fewer are stored one by one: arrays cost more than they save."""


class Storing:
    """Stores entries with a copy in one tier. Keeps visible blocks prefix-closed in each segment."""

    def __init__(self, holdings: Holdings, history: History) -> None:
        self._holdings, self._history = holdings, history

    def store(self, tier: int, entries: Sequence[Entry], places: Sequence[int], changes: Changes) -> list[Outcome]:
        """Entries of one group and one put, in any order. Raises IndexFull before anything is stored."""
        if not entries:
            return []
        table = self._holdings.table
        if table.free_rows < 2 * len(entries):
            self._check_room(entries)
        record = self._holdings.groups.intern(entries[0].group)
        outcomes = [Outcome.ORPHAN] * len(entries)
        foreign: set[bytes] = set()
        stored: list[int] = []
        parent, parent_hash = 0, b""
        order = _parents_first(entries)
        at = 0
        while at < len(order):
            index = order[at]
            entry = entries[index]
            at += 1
            if entry.key.kind is Kind.SNAPSHOT:
                outcome, row = self._snapshot(tier, entry, record, places[index], changes)
            else:
                if parent_hash != entry.parent_hash:
                    parent = table.find(entry.parent_hash)
                outcome, row = self._block(tier, entry, record, parent, places[index], changes)
                parent, parent_hash = row, entry.key.block_hash
            if outcome is Outcome.ORPHAN and (entry.parent_hash in foreign or entry.key.block_hash in foreign):
                outcome = Outcome.FOREIGN
            if outcome is Outcome.FOREIGN:
                foreign.add(entry.key.block_hash)
            outcomes[index] = outcome
            if outcome is Outcome.STORED:
                changes.stored.append(entry.key)
                stored.append(row)
                run = self._run(entries, order, at, entry) if entry.key.kind is Kind.BLOCK else []
                if run:
                    new = self._holdings.show_run(
                        tier, record, row, [entries[n] for n in run], [places[n] for n in run]
                    )
                    changes.stored += [entries[n].key for n in run]
                    stored += new.tolist()
                    for n in run:
                        outcomes[n] = Outcome.STORED
                    at += len(run)
                    parent, parent_hash = stored[-1], entries[run[-1]].key.block_hash
        if stored:
            rows = np.array(stored, np.uint32)
            self._remember(rows, is_recovered=tier == SSD)
            for row in rows[self._holdings.are_leaves(rows)].tolist():
                self._holdings.offer(row)
        return outcomes

    def recover(self, records: Iterable[tuple[Entry, int]], changes: Changes) -> int:
        """Takes what a disk has; returns how many became visible. What comes before its parent waits to the end."""
        count = 0
        waiting: list[tuple[Entry, int]] = []
        for entry, location in records:
            outcome = self.store(SSD, [entry], [location], Changes())[0]
            if outcome is Outcome.STORED:
                changes.stored.append(entry.key)
                count += 1
            elif outcome is Outcome.ORPHAN:
                waiting.append((entry, location))
            else:
                changes.freed_ssd.append((entry.key, location))
        waiting.sort(key=lambda one: (one[0].block_index, one[0].key.kind is Kind.SNAPSHOT))
        for entry, location in waiting:
            one = Changes()
            count += self.store(SSD, [entry], [location], one)[0] is Outcome.STORED
            changes.stored += one.stored
            changes.freed_ssd += one.freed_ssd
        return count

    def attach(self, tier: int, row: int, checksum: int, place: int) -> bool:
        """Gives a visible row a copy that it lacks; False if it has one, or the bytes are others."""
        table = self._holdings.table
        if table.places[tier].at[row] != NO_PLACE[tier] or table.checksum.at[row] != checksum:
            return False
        self._holdings.give_copy(tier, row, place)
        self._holdings.offer(row)
        return True

    def _remember(self, rows: Rows, *, is_recovered: bool) -> None:
        """Tells the history of new blocks, run by run, and then of new snapshots."""
        table = self._holdings.table
        is_snapshot = table.state.array[rows] & SNAPSHOT != 0
        blocks, snapshots = rows[~is_snapshot], rows[is_snapshot]
        if len(blocks):
            begins = np.flatnonzero(table.parent.array[blocks[1:]] != blocks[:-1]) + 1
            for run in np.split(blocks, begins):
                self._history.stored(run, is_recovered=is_recovered)
        for row in snapshots.tolist():
            self._history.stored_snapshot(row, table.parent.at[row])

    def _check_room(self, entries: Sequence[Entry]) -> None:
        known = {one.key.block_hash for one in entries}
        firsts = (one for one in entries if not one.block_index % SEGMENT_BLOCKS)
        stubs = {one.parent_hash for one in firsts if one.parent_hash not in known}
        table = self._holdings.table
        need = len(entries) + sum(not table.find(parent_hash) for parent_hash in stubs)
        if table.free_rows < need:
            raise IndexFull(f"{need} rows wanted, {table.free_rows} free", wanted=need, free=table.free_rows)

    def _run(self, entries: Sequence[Entry], order: Sequence[int], begin: int, before: Entry) -> list[int]:
        """Which entries, in order from `begin`, are new blocks one after the other on `before`; empty if only few."""
        table, run = self._holdings.table, []
        heads, bucket_count = table.heads.at, table.bucket_count
        before_hash, position, form = before.key.block_hash, before.position_end, before.form
        for index in itertools.islice(order, begin, None):
            entry = entries[index]
            kind, block_hash = entry.key
            position += BLOCK_TOKENS
            if (
                entry.parent_hash != before_hash
                or kind is not Kind.BLOCK
                or entry.position_end != position
                or (entry.form is not form and entry.form != form)
                or (heads[hash(block_hash) % bucket_count] and table.find(block_hash))
            ):
                break
            run.append(index)
            before_hash = block_hash
        return run if len(run) >= _SHORTEST_RUN else []

    def _block(
        self, tier: int, entry: Entry, record: GroupRecord, parent: int, place: int, changes: Changes
    ) -> tuple[Outcome, int]:
        holdings, table = self._holdings, self._holdings.table
        row = table.find(entry.key.block_hash)
        if row and table.state.at[row] & VISIBLE:
            return self._present(tier, row, entry, record, place, changes), row
        index = entry.block_index
        is_visible = parent and table.state.at[parent] & VISIBLE
        if is_visible and table.group.at[parent] != record.number:
            is_visible = parent = 0
            if index % SEGMENT_BLOCKS == 0:
                return self._refuse(tier, entry, place, changes, Outcome.ORPHAN), 0
        if index % SEGMENT_BLOCKS and not is_visible:
            return self._refuse(tier, entry, place, changes, Outcome.ORPHAN), 0
        if is_visible and table.block_index.at[parent] != index - 1:
            return self._refuse(tier, entry, place, changes, Outcome.REFUSED), 0
        if record.block_form is None:
            holdings.groups.set_block_form(record, entry.form)
        elif record.block_form is not entry.form and record.block_form != entry.form:
            return self._refuse(tier, entry, place, changes, Outcome.REFUSED), 0
        if not parent:
            parent = holdings.stub(entry.parent_hash)
        if not row:
            row = holdings.stub(entry.key.block_hash)
        holdings.show(row, record, parent, index, entry.checksum)
        holdings.give_copy(tier, row, place)
        return Outcome.STORED, row

    def _snapshot(
        self, tier: int, entry: Entry, record: GroupRecord, place: int, changes: Changes
    ) -> tuple[Outcome, int]:
        holdings, table = self._holdings, self._holdings.table
        block = table.find(entry.key.block_hash)
        if not block or not table.state.at[block] & VISIBLE:
            return self._refuse(tier, entry, place, changes, Outcome.ORPHAN), 0
        if table.group.at[block] != record.number:
            return self._refuse(tier, entry, place, changes, Outcome.FOREIGN), 0
        row = table.snapshot_of(block)
        if row:
            return self._present(tier, row, entry, record, place, changes), row
        form_number = holdings.groups.form_number(entry.form)
        if form_number is None or table.block_index.at[block] != entry.block_index:
            return self._refuse(tier, entry, place, changes, Outcome.REFUSED), 0
        row = holdings.snapshot(form_number)
        holdings.show(row, record, block, entry.block_index, entry.checksum)
        holdings.give_copy(tier, row, place)
        return Outcome.STORED, row

    def _present(self, tier: int, row: int, entry: Entry, record: GroupRecord, place: int, changes: Changes) -> Outcome:
        if self._holdings.table.group.at[row] != record.number:
            return self._refuse(tier, entry, place, changes, Outcome.FOREIGN)
        if self.attach(tier, row, entry.checksum, place):
            return Outcome.PRESENT
        return self._refuse(tier, entry, place, changes, Outcome.PRESENT)

    @staticmethod
    def _refuse(tier: int, entry: Entry, place: int, changes: Changes, outcome: Outcome) -> Outcome:
        if tier == RAM:
            changes.freed_slabs.append(place)
        else:
            changes.freed_ssd.append((entry.key, place))
        return outcome


def _parents_first(entries: Sequence[Entry]) -> Sequence[int]:
    """Chains by where they begin, each in one piece, then snapshots. Rows that follow each other are found faster."""
    is_in_order = entries[0].key.kind is Kind.BLOCK and all(
        one.position_end < two.position_end and two.key.kind is Kind.BLOCK for one, two in itertools.pairwise(entries)
    )
    if is_in_order:
        return range(len(entries))
    begins = [0] + [
        n + 1
        for n, (one, two) in enumerate(itertools.pairwise(entries))
        if two.parent_hash != one.key.block_hash or two.key.kind is not one.key.kind
    ]
    pieces = [range(begin, end) for begin, end in itertools.pairwise([*begins, len(entries)])]
    pieces.sort(key=lambda one: (entries[one[0]].key.kind is Kind.SNAPSHOT, entries[one[0]].position_end))
    return [n for one in pieces for n in one]
