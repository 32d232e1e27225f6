"""Hit ratio of the eviction policy on synthetic traffic, beside LRU and the offline optimum.

    make bench-kv-traces

Both policies run in the same index with the same rules: leaves before parents, a prefix counts only as far as it is
usable with a snapshot, or by warm replay less the rows that the replay runs again. What is counted: usable prompt
tokens over all prompt tokens, after the first part of the trace, in which the cache fills.

The bound is PFOO-L (Berger, Beckmann, Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes",
2018): each use of a block again may be bought by keeping the block since its last use; the cheapest are bought until
capacity x time is spent. It knows the future, keeps no snapshots, and may go over capacity at any one moment: no policy
reaches it, and the optimum lies below it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from bench.harness import Bar, finish
from bench.kv_workload import BLOCK_TOKENS, Mix, Request, Traffic
from numpy.typing import NDArray
from shoal_kv_cache.core import entries as units
from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.eviction import Policy
from shoal_kv_cache.core.found import Copy
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases

CAPACITY_BYTES = 24_000 * 113_920
REPLAY_LENGTH, REPLAY_REACH = 140, 2560
WARM_SHARE = 0.4
_SCALE = BLOCK_TOKENS // units.BLOCK_TOKENS
_GROUP = Group("kv", "numerics", b"tenant")
_BLOCK = Form(128, (113_920 * _SCALE,), "uint8", 113_920 * _SCALE)
_SNAPSHOT = Form(128, (20, 128, 528), "uint8", 1_351_680)


class LeastRecentlyUsed:
    """The baseline: worth falls with the time since the last use."""

    def __init__(self, holdings: Holdings, history: History) -> None:
        self._history = history

    def scores(self, rows: Rows) -> NDArray[np.float64]:
        """Minus the age."""
        return -self._history.ages(rows).astype(np.float64)


@dataclass(slots=True)
class Score:
    """Tokens that were asked for and that were usable."""

    usable_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ratio(self) -> float:
        """Usable over asked for."""
        return self.usable_tokens / max(1, self.prompt_tokens)


class Replay:
    """Runs a trace against an index as engines do: acquire and put at the start, put at the end."""

    def __init__(self, policy: Callable[[Holdings, History], Policy] | None) -> None:
        self._index = Index(
            Leases(max_leases=4),
            max_entries=CAPACITY_BYTES // _BLOCK.size_bytes + 4096,
            snapshot_tokens=REPLAY_REACH // _SCALE,
            policy=policy,
        )

    def run(self, requests: Sequence[Request]) -> dict[str, Score]:
        """Scores by kind of request."""
        scores: dict[str, Score] = {}
        moments = [(one.arrived_s, 0, number) for number, one in enumerate(requests)]
        moments += [(one.finished_s, 1, number) for number, one in enumerate(requests)]
        for _, is_end, number in sorted(moments):
            request = requests[number]
            if is_end:
                self._finish(request)
                continue
            usable = self._start(request)
            if number >= WARM_SHARE * len(requests):
                score = scores.setdefault(request.kind, Score())
                score.usable_tokens += usable
                score.prompt_tokens += request.prompt_tokens
        return scores

    def _start(self, request: Request) -> int:
        index, hashes, changes = self._index, request.hashes, Changes()
        last = _snapshot_blocks(request.prompt_tokens)
        found = index.find(_GROUP, hashes[: request.prompt_tokens // BLOCK_TOKENS])
        usable = found.usable(Copy.RAM, max_hit_tokens=last * units.BLOCK_TOKENS)
        hit, replay = usable.hit_tokens * _SCALE, usable.replay_tokens * _SCALE
        start = max(0, replay - REPLAY_REACH)
        is_replayed = replay > hit and (start > hit or hit == 0)  # as the engine chooses
        tokens = replay if is_replayed else hit
        blocks = tokens // BLOCK_TOKENS
        snapshot = None if is_replayed else usable.snapshot
        index.pin("request", "owner", 1.0, found, block_count=blocks, snapshot=snapshot)
        cuts = {last, min(found.block_count, last) if found.block_count > blocks else last}
        if is_replayed:
            cuts.add(blocks)
        self._put(hashes, blocks, request.prompt_tokens // BLOCK_TOKENS, cuts)
        index.release("request", changes)
        return start if is_replayed else hit

    def _finish(self, request: Request) -> None:
        length = request.prompt_tokens + request.answer_tokens
        begin, end = request.prompt_tokens // BLOCK_TOKENS, length // BLOCK_TOKENS
        self._put(request.hashes, begin, end, {_snapshot_blocks(length)})

    def _put(self, hashes: Sequence[bytes], begin: int, end: int, snapshots: set[int]) -> None:
        index, changes = self._index, Changes()
        wanted = [_entry(hashes, place, Kind.BLOCK) for place in range(begin, end)]
        wanted += [_entry(hashes, cut - 1, Kind.SNAPSHOT) for cut in sorted(snapshots) if cut]
        missing = index.missing(_GROUP, [one.key for one in wanted])
        entries = [one for one, is_missing in zip(wanted, missing, strict=True) if is_missing]
        below = [one.parent_hash if one.key.kind is Kind.BLOCK else one.key.block_hash for one in entries]
        index.hold("put", "owner", 1.0, _GROUP, [Key(Kind.BLOCK, block_hash) for block_hash in below])
        size = sum(one.size_bytes for one in entries)
        excess = index.usage()[0].used_bytes + size - CAPACITY_BYTES
        if excess <= 0 or index.evict_ram(excess, changes) >= excess:
            index.store(entries, [0] * len(entries), changes)
        index.release("put", changes)


def optimum_bound(requests: Sequence[Request]) -> float:
    """PFOO-L: the hit ratio that nothing surpasses."""
    last: dict[bytes, int] = {}
    gaps: list[int] = []
    first = int(WARM_SHARE * len(requests))
    for number, request in enumerate(requests):
        usable = _snapshot_blocks(request.prompt_tokens)
        for place, block_hash in enumerate(request.hashes):
            before = last.get(block_hash)
            if before is not None and place < usable and number >= first:
                gaps.append(number - before)
            if before is None or place < usable:
                last[block_hash] = number
    spent = np.cumsum(np.sort(np.array(gaps))) * _BLOCK.size_bytes
    bought = int(np.searchsorted(spent, CAPACITY_BYTES * (len(requests) - first)))
    return bought * BLOCK_TOKENS / sum(one.prompt_tokens for one in requests[first:])


def main() -> int:
    """Replay under both policies and report."""
    mix = Mix()
    requests = Traffic(mix).requests()
    lru, learned = Replay(LeastRecentlyUsed).run(requests), Replay(None).run(requests)
    ratio = {name: _total(scores).ratio for name, scores in (("lru", lru), ("learned", learned))}
    bound = optimum_bound(requests)
    seen: set[bytes] = set()
    reused = total = 0
    for request in requests:
        blocks = request.hashes[: request.prompt_tokens // BLOCK_TOKENS]
        reused += sum(block_hash in seen for block_hash in blocks)
        total += len(blocks)
        seen.update(request.hashes)
    return finish(
        "kv_traces",
        workload={
            **{name: getattr(mix, name) for name in Mix.__dataclass_fields__},
            "requests": len(requests),
            "capacity_bytes": CAPACITY_BYTES,
            "median_prompt_tokens": int(np.median([one.prompt_tokens for one in requests])),
            "reuse": reused / total,
        },
        bars=[
            Bar(name="lru_hit_ratio_from", value=ratio["lru"], want=0.5, sense="at least", unit=""),
            Bar(name="lru_hit_ratio_to", value=ratio["lru"], want=0.7, sense="at most", unit=""),
            Bar(
                name="points_over_lru", value=100 * (ratio["learned"] - ratio["lru"]), want=5, sense="at least", unit=""
            ),
        ],
        figures={
            "hit_ratio": ratio,
            "optimum_is_below": bound,
            "points_below_bound": 100 * (bound - ratio["learned"]),
            "by_kind": {
                name: {kind: score.ratio for kind, score in scores.items()}
                for name, scores in (("lru", lru), ("learned", learned))
            },
        },
    )


def _total(scores: dict[str, Score]) -> Score:
    return Score(sum(one.usable_tokens for one in scores.values()), sum(one.prompt_tokens for one in scores.values()))


def _snapshot_blocks(length: int) -> int:
    return max(0, length - REPLAY_LENGTH) // BLOCK_TOKENS


def _entry(hashes: Sequence[bytes], place: int, kind: Kind) -> Entry:
    parent = hashes[place - 1] if place else bytes(32)
    form = _BLOCK if kind is Kind.BLOCK else _SNAPSHOT
    return Entry(Key(kind, hashes[place]), _GROUP, parent, (place + 1) * units.BLOCK_TOKENS, form, 0)


if __name__ == "__main__":
    sys.exit(main())
