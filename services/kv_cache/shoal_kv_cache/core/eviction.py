"""Lets copies go from a tier until there is room: leaves before parents, the least valuable first."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.candidates import Candidates, Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.table import NO_PLACE, RAM, SSD, VISIBLE

SAMPLE_ROWS = 512
BATCH_ROWS = 32


class Policy(Protocol):
    """Says what is worth keeping in one tier."""

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """The worth of each row per byte: the least goes first."""
        ...


class Evictor:
    """Evicts from one tier.

    Leaves are drawn at random, the least valuable of them go, and what they stood on follows while it is worth no more
    than the leaves that were spared: so a chain that nobody wants goes in one sweep.
    """

    def __init__(
        self,
        holdings: Holdings,
        tier: int,
        policy: Policy,
        *,
        seed: int,
        sample_rows: int = SAMPLE_ROWS,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self._holdings, self._tier, self._policy = holdings, tier, policy
        self._sample_rows, self._batch_rows = sample_rows, batch_rows
        self._random = np.random.default_rng(seed)

    def evict(self, size_bytes: int, changes: Changes, *, only_tenant: int | None = None) -> int:
        """Lets copies go until their payloads sum up to `size_bytes`; returns the bytes."""
        done = 0
        candidates = self._holdings.candidates[self._tier]
        while done < size_bytes:
            victims, bound = self._victims(candidates, only_tenant)
            if not victims:
                break
            for row in victims:
                if done < size_bytes:
                    done += self._sweep(candidates, row, bound, size_bytes - done, changes)
                else:
                    candidates.offer(row)
        return done

    def _victims(self, candidates: Candidates, only_tenant: int | None) -> tuple[list[int], float]:
        """Rows to evict, the least valuable first, and the worth of the least one spared. They are off the list."""
        while count := len(candidates):
            if only_tenant is not None or count <= self._sample_rows:
                positions = np.arange(count)
            else:
                positions = np.unique(self._random.integers(0, count, self._sample_rows))
            rows, kept, unfit = candidates.draw(positions)
            if only_tenant is not None and len(rows):
                mine = self._holdings.groups.of_tenant(only_tenant)[self._holdings.table.group.array[rows]]
                rows, kept = rows[mine], kept[mine]
            if not len(rows):
                candidates.dismiss(unfit)
                if only_tenant is not None:
                    break
                continue
            scores = self._policy.scores(rows)
            order = np.argsort(scores, kind="stable")
            batch = order[: self._batch_rows]
            bound = float(scores[order[len(batch)]]) if len(batch) < len(order) else float("inf")
            victims: list[int] = rows[batch].tolist()
            candidates.dismiss(np.concatenate([unfit, kept[batch]]))
            return victims, bound
        return [], 0.0

    def _sweep(self, candidates: Candidates, row: int, bound: float, size_bytes: int, changes: Changes) -> int:
        """Evicts a row and then what it stood on, while that is worth at most `bound`; returns the bytes."""
        holdings, table = self._holdings, self._holdings.table
        state, parents = table.state.at, table.parent.at
        last_use = table.last_use.at
        done = 0
        used_together = last_use[row]
        while candidates.can_go(row):
            if last_use[row] != used_together:
                if self._policy.scores(np.array([row], np.uint32))[0] > bound:
                    break
                used_together = last_use[row]
            parent = parents[row]
            done += self._evict(row, changes)
            if not state[parent] & VISIBLE:
                row = 0
                break
            row = parent
            if done >= size_bytes:
                break
        if row:
            holdings.offer(row)
        return done

    def _evict(self, row: int, changes: Changes) -> int:
        holdings, table, tier = self._holdings, self._holdings.table, self._tier
        size = holdings.size_bytes(row)
        place = holdings.take_copy(tier, row)
        if tier == RAM:
            changes.freed_slabs.append(place)
        else:
            changes.freed_ssd.append((holdings.key(row), place))
        other = SSD if tier == RAM else RAM
        if table.places[other].at[row] == NO_PLACE[other]:
            holdings.hide(row, changes)
        else:
            holdings.candidates[other].offer(row)
        return size
