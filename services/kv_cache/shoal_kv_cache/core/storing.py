"""Takes entries in: which become visible, which do not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import SEGMENT_BLOCKS, Entry, Kind
from shoal_kv_cache.core.groups import GroupRecord
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.results import Outcome
from shoal_kv_cache.core.table import NO_PLACE, RAM, SSD, VISIBLE, IndexFull


class Storing:
    """Stores entries with a copy in one tier. Keeps visible blocks prefix-closed in each segment."""

    def __init__(self, holdings: Holdings, history: History) -> None:
        self._holdings, self._history = holdings, history

    def store(self, tier: int, entries: Sequence[Entry], places: Sequence[int], changes: Changes) -> list[Outcome]:
        """Entries of one group and one put, in any order. Raises IndexFull before anything is stored."""
        if not entries:
            return []
        table = self._holdings.table
        need = len(entries) + sum(one.block_index % SEGMENT_BLOCKS == 0 for one in entries)
        if table.free_rows < need:
            raise IndexFull(f"{need} rows wanted, {table.free_rows} free", wanted=need, free=table.free_rows)
        record = self._holdings.groups.intern(entries[0].group)
        self._history.advance(len(entries))
        outcomes = [Outcome.ORPHAN] * len(entries)
        foreign: set[bytes] = set()
        leaves: set[int] = set()
        parent, parent_hash = 0, b""
        for index in _parents_first(entries):
            entry = entries[index]
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
            if outcome is Outcome.STORED:
                changes.stored.append(entry.key)
                leaves.discard(table.parent.at[row])
                leaves.add(row)
            outcomes[index] = outcome
        for row in leaves:
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
        self._history.stored(row, parent, is_continued=bool(is_visible) and not holdings.has_children(parent))
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
        self._history.stored_snapshot(row, block)
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


def _parents_first(entries: Sequence[Entry]) -> list[int]:
    return sorted(range(len(entries)), key=lambda n: (entries[n].position_end, entries[n].key.kind is Kind.SNAPSHOT))
