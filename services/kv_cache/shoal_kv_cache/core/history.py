"""What is remembered of each row's past: when it was asked for last, and of what conversation it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.entries import HASH_BYTES
from shoal_kv_cache.core.origins import ORIGINS, Origins
from shoal_kv_cache.core.table import SNAPSHOT, Table

_TICKS_PER_S = 8
_MAX_TICKS = 0xFFFF_FFFF
_SAME_TURN_S = 1.0
"""Asked for again so soon, it is by another worker for the same turn."""
_OWN_SHARE = 1 / 8
_PLACE, _HAS_RETURNED, _PACE_SHIFT, _PASSED = 0x1FF, 0x100, 9, 0x8000
_PACES = 64
_PACE_STEPS = 4
"""Of the pace in a row, for each doubling."""
_ENTRIES_PER_CONVERSATION = 64
_LEAST_CONVERSATIONS = 1024


@dataclass(slots=True)
class _Conversation:
    since: int  # tick of the last turn
    origin: int
    pace: float  # log2 of seconds between turns
    has_returned: bool


class History:
    """Time, conversations, and a word a row: origin, whether turns came after the first, pace; or passed.

    A conversation is known by the last block of its chain, held or not: it moves on as the chain grows. It has another
    turn when that block is asked for, or stored again after it was evicted. So what is evicted early does not seem
    useless for it. At most one for every 64 rows; the one that waits longest is forgotten.

    Time is what it was set to last, in steps of 1/8 s; it does not go back.
    """

    def __init__(self, table: Table, origins: Origins) -> None:
        self._table, self._origins = table, origins
        self._max_conversations = max(_LEAST_CONVERSATIONS, table.max_rows // _ENTRIES_PER_CONVERSATION)
        self._waiting: dict[bytes, _Conversation] = {}  # by last turn
        self._began_s: float | None = None
        self._now = 0

    def set_time(self, now_s: float) -> None:
        """It is now so late, on any clock."""
        if self._began_s is None:
            self._began_s = now_s
        self._now = max(self._now, min(int((now_s - self._began_s) * _TICKS_PER_S), _MAX_TICKS))

    def asked(self, blocks: Rows | range) -> None:
        """Leading blocks of a chain are asked for now, in order."""
        if not len(blocks):
            return
        table = self._table
        where = slice(blocks.start, blocks.stop) if isinstance(blocks, range) else blocks
        table.last_use.array[where] = self._now
        last = table.hash_of(int(blocks[-1]))
        conversation = self._waiting.get(last)
        if conversation is not None and self._returns(conversation):
            table.history.array[where] = _word(conversation)
            self._waiting[last] = self._waiting.pop(last)

    def used_snapshot(self, row: int) -> None:
        """A snapshot is used: though there may be a later one, here is where chains branch."""
        self._table.last_use.at[row] = self._now
        self._table.history.at[row] = 0

    def stored(self, blocks: Rows, *, is_recovered: bool) -> None:
        """Blocks are new, each the child of the one before. What is recovered from a disk tells nothing of turns."""
        table, waiting = self._table, self._waiting
        first = int(blocks[0])
        conversation = waiting.pop(table.hash_of(table.parent.at[first]), None)
        if conversation is not None:
            conversation.since = self._now
        else:
            conversation = self._come_back(blocks) or self._begin(first, is_recovered)
        table.history.array[blocks] = _word(conversation)
        table.last_use.array[blocks] = self._now
        waiting[table.hash_of(int(blocks[-1]))] = conversation
        if len(waiting) > self._max_conversations:
            del waiting[next(iter(waiting))]

    def stored_snapshot(self, row: int, block: int) -> None:
        """A snapshot of a block is new: the one before it is passed, unless chains branch off in between."""
        table = self._table
        table.history.at[row] = 0
        table.last_use.at[row] = self._now
        before = self._snapshot_before(block)
        if before:
            table.history.at[before] = _PASSED

    def ages(self, rows: Rows) -> Rows:
        """Ticks since each row was asked for."""
        return np.uint32(self._now) - self._table.last_use.array[rows]

    def chances(self, rows: Rows) -> NDArray[np.float64]:
        """How likely each row is to be used in the next second; 0 for a snapshot that is passed.

        Of those that wait, a share p has another turn. Its pause is longer than a with the chance t / (t + a), t being
        the usual one: it is likely to go on for as long as it has gone on, and no less than is usual. Who has waited
        for a then has ended or is still to come; the latter with the chance p t / (t + (1 - p) a), by Bayes, and it
        comes in the next second with 1 / (t + a).
        """
        table = self._table
        is_snapshot = table.state.array[rows] & SNAPSHOT != 0
        words = table.history.array[np.where(is_snapshot, table.parent.array[rows], rows)]
        usual_s = np.exp2((words >> _PACE_SHIFT & (_PACES - 1)) / _PACE_STEPS)
        waited_s = self.ages(rows) / _TICKS_PER_S
        shares = self._origins.chances(words & _PLACE)
        found = shares * usual_s / ((usual_s + (1 - shares) * waited_s) * (usual_s + waited_s))
        found[is_snapshot & (table.history.array[rows] == _PASSED)] = 0
        return found

    def _come_back(self, blocks: Rows) -> _Conversation | None:
        """The conversation, if one of the blocks was the last of one before it was evicted."""
        table, waiting = self._table, self._waiting
        for row in blocks.tolist():
            conversation = waiting.pop(table.hash_of(row), None)
            if conversation is not None:
                self._returns(conversation)
                return conversation
        return None

    def _begin(self, first: int, is_recovered: bool) -> _Conversation:
        table = self._table
        if table.block_index.at[first]:
            origin = table.history.at[table.parent.at[first]] % ORIGINS
        else:
            origin = table.hashes[first * HASH_BYTES]
        if not is_recovered:
            self._origins.waits(origin, has_returned=False)
        return _Conversation(self._now, origin, self._origins.pace(origin), has_returned=False)

    def _returns(self, conversation: _Conversation) -> bool:
        """It has another turn now; False if it is still the same one."""
        pause_s = (self._now - conversation.since) / _TICKS_PER_S
        conversation.since = self._now
        if pause_s < _SAME_TURN_S:
            return False
        origin = conversation.origin
        self._origins.returns(origin, pause_s, has_returned=conversation.has_returned)
        self._origins.waits(origin, has_returned=True)
        conversation.has_returned = True
        conversation.pace += (math.log2(pause_s) - conversation.pace) * _OWN_SHARE
        return True

    def _snapshot_before(self, block: int) -> int:
        """The next snapshot up the chain from a block, itself excepted; 0 if chains branch off before it."""
        table = self._table
        parents, first_child, state = table.parent.at, table.first_child.at, table.state.at
        next_sibling = table.next_sibling.at
        for _ in range(1024):
            if not table.block_index.at[block]:
                return 0
            block = parents[block]
            first = first_child[block]
            if first and state[first] & SNAPSHOT:
                after = next_sibling[first]
                return 0 if after and next_sibling[after] else first
            if first and next_sibling[first]:
                return 0
        return 0


def _word(conversation: _Conversation) -> int:
    pace = min(max(round(conversation.pace * _PACE_STEPS), 0), _PACES - 1)
    return pace << _PACE_SHIFT | (_HAS_RETURNED if conversation.has_returned else 0) | conversation.origin
