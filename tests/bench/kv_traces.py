"""Hit ratio of the eviction policy on synthetic traffic, beside LRU, S3-FIFO, ARC and the offline optimum.

    make bench-kv-traces

All policies run in the same index with the same rules: leaves before parents, a prefix counts only as far as it is
usable with a snapshot, or by warm replay less the rows that the replay runs again. What is counted: usable prompt
tokens over all prompt tokens, after the first part of the trace, in which the cache fills and sessions come to be of
every age. LRU, S3-FIFO and ARC take blocks and snapshots alike, by their bytes; what they see used is what an acquire
finds, once a request, and the snapshot that it is given.

The bars are on traffic that the policy was not made on: three seeds at one size. Beside them, without a bar: other
sizes, and a mix with other pauses where everything begins with the same tokens.

The bound is PFOO-L (Berger, Beckmann, Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes",
2018): each use of a piece again may be bought by keeping the piece since its last use; the cheapest are bought until
capacity x time is spent. It knows the future, keeps no snapshots, and may go over capacity at any one moment: no policy
reaches it, and the optimum lies below it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from bench.harness import Bar, finish
from bench.kv_arc import Arc
from bench.kv_s3_fifo import S3Fifo
from bench.kv_tree import Item, TreePolicy
from bench.kv_workload import Hashes, Mix, Piece, Request, Traffic, path
from numpy.typing import NDArray
from shoal_kv_cache.core.candidates import Rows
from shoal_kv_cache.core.changes import Changes
from shoal_kv_cache.core.entries import BLOCK_TOKENS, Entry, Form, Group, Key, Kind
from shoal_kv_cache.core.eviction import Policy
from shoal_kv_cache.core.found import Copy
from shoal_kv_cache.core.history import History
from shoal_kv_cache.core.holdings import Holdings
from shoal_kv_cache.core.index import Index
from shoal_kv_cache.core.leases import Leases
from shoal_kv_cache.core.results import Outcome

CAPACITY_BLOCKS = 6_000
OTHER_SIZES = (8_000, 11_000)
SEEDS = (201, 202, 203)
"""Not looked at while the policy was made; that was done on 1 to 3, 11 to 13, 301 and 304 to 306."""
OTHER_MIX = Mix(
    seed=103,
    preamble_tokens=2_000,
    agent_turns=25,
    person_share=0.25,
    tool_pause_s=8,
    person_pause_s=600,
    chat_pause_s=90,
    scan_jobs=2,
    scan_tokens=30_000,
    scan_every_s=2,
)
PUBLISHED: dict[str, Callable[[int], TreePolicy]] = {"s3_fifo": S3Fifo, "arc": Arc}
REPLAY_LENGTH, REPLAY_REACH = 140, 2560
WARM_SHARE = 0.4
_SNAPSHOT_MARK = b"snapshot"
_GROUP = Group("kv", "numerics", b"tenant")
_BLOCK = Form(128, (113_920,), "uint8", 113_920)
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

    def __init__(
        self,
        capacity_blocks: int,
        policy: Callable[[Holdings, History], Policy] | None = None,
        *,
        tree_policy: Callable[[int], TreePolicy] | None = None,
    ) -> None:
        """policy       of the index; None: its own
        tree_policy  made for so many bytes; then that says what goes, and the index's policy nothing
        """
        self._capacity_bytes = capacity_blocks * _BLOCK.size_bytes
        self._tree = tree_policy(self._capacity_bytes) if tree_policy is not None else None
        self._hashes = Hashes()
        self._index = Index(
            Leases(max_leases=4), max_entries=capacity_blocks + 4096, snapshot_tokens=REPLAY_REACH, policy=policy
        )

    def run(self, requests: Sequence[Request]) -> dict[str, Score]:
        """Scores by kind of request."""
        scores: dict[str, Score] = {}
        moments = [(one.arrived_s, 0, number) for number, one in enumerate(requests)]
        moments += [(one.finished_s, 1, number) for number, one in enumerate(requests)]
        for now_s, is_end, number in sorted(moments):
            request = requests[number]
            self._index.expire(now_s, Changes())
            if is_end:
                self._finish(request)
                continue
            usable = self._start(request)
            if number >= WARM_SHARE * len(requests):
                score = scores.setdefault(request.kind, Score())
                score.usable_tokens += usable
                score.prompt_tokens += request.prompt.end
        return scores

    def _start(self, request: Request) -> int:
        index, hashes, changes = self._index, self._hashes.of(request.prompt), Changes()
        last = _snapshot_blocks(request.prompt.end)
        found = index.find(_GROUP, hashes)
        usable = found.usable(Copy.RAM, max_hit_tokens=last * BLOCK_TOKENS)
        hit, replay = usable.hit_tokens, usable.replay_tokens
        start = max(0, replay - REPLAY_REACH)
        is_replayed = replay > hit and (start > hit or hit == 0)  # as the engine chooses
        blocks = (replay if is_replayed else hit) // BLOCK_TOKENS
        snapshot = None if is_replayed else usable.snapshot
        index.pin("request", "owner", 1e9, found, block_count=blocks, snapshot=snapshot)
        kept: set[bytes] = set(hashes[blocks - 1 : blocks])
        used = [] if snapshot is None else [_name(Key(Kind.SNAPSHOT, hashes[snapshot.block_index]))]
        kept.update(used)
        if self._tree is not None:
            self._tree.use([*hashes[: found.block_count], *used])
        cuts = {last, min(found.block_count, last) if found.block_count > blocks else last}
        if is_replayed:
            cuts.add(blocks)
        self._put(hashes, blocks, cuts, kept)
        index.release("request", changes)
        return start if is_replayed else hit

    def _finish(self, request: Request) -> None:
        hashes, begin = self._hashes.of(request.answer), request.prompt.end // BLOCK_TOKENS
        self._put(hashes, begin, {_snapshot_blocks(request.answer.end)}, set())

    def _put(self, hashes: Sequence[bytes], begin: int, snapshots: set[int], kept: set[bytes]) -> None:
        """kept: names of what the request has pinned."""
        index, changes = self._index, Changes()
        wanted = [_entry(hashes, place, Kind.BLOCK) for place in range(begin, len(hashes))]
        wanted += [_entry(hashes, cut - 1, Kind.SNAPSHOT) for cut in sorted(snapshots) if cut]
        missing = index.missing(_GROUP, [one.key for one in wanted])
        entries = [one for one, is_missing in zip(wanted, missing, strict=True) if is_missing]
        below = [one.parent_hash if one.key.kind is Kind.BLOCK else one.key.block_hash for one in entries]
        index.hold("put", "owner", 1e9, _GROUP, [Key(Kind.BLOCK, block_hash) for block_hash in below])
        size = sum(one.size_bytes for one in entries)
        excess = index.usage()[0].used_bytes + size - self._capacity_bytes
        if excess <= 0 or self._evict(excess, entries, kept | set(below), changes) >= excess:
            outcomes = index.store(entries, [0] * len(entries), changes)
            if self._tree is not None:
                pairs = zip(entries, outcomes, strict=True)
                self._tree.store([_item(one) for one, outcome in pairs if outcome is Outcome.STORED])
        index.release("put", changes)

    def _evict(self, size_bytes: int, coming: Sequence[Entry], kept: set[bytes], changes: Changes) -> int:
        if self._tree is None:
            return self._index.evict_ram(size_bytes, changes)
        before = self._index.usage()[0].used_bytes
        for name in self._tree.make_room(size_bytes, [_item(one) for one in coming], kept):
            if self._index.drop(_key(name), changes) != 1:
                raise RuntimeError("something stood on what was evicted")
        return before - self._index.usage()[0].used_bytes


def optimum_bound(requests: Sequence[Request], capacity_blocks: int) -> float:
    """PFOO-L: the hit ratio that nothing surpasses."""
    last: dict[int, int] = {}
    uses: list[tuple[int, int]] = []  # requests to be waited for, tokens
    first = int(WARM_SHARE * len(requests))
    for number, request in enumerate(requests):
        for piece in path(request.prompt):
            if number >= first and piece.number in last:
                uses.append((number - last[piece.number], piece.end - piece.begin))
            last[piece.number] = number
        last[request.answer.number] = number
    uses.sort()
    waits, tokens = np.array(uses, np.float64).T
    spent = np.cumsum(waits * tokens)
    bought = int(np.searchsorted(spent, capacity_blocks * BLOCK_TOKENS * (len(requests) - first)))
    return float(tokens[:bought].sum()) / sum(one.prompt.end for one in requests[first:])


def compare(mix: Mix, capacity_blocks: int, *, with_published: bool = False) -> dict[str, object]:
    """LRU, ours and the bound on one trace; S3-FIFO and ARC too, which takes four times as long."""
    requests = Traffic(mix).requests()
    scores = {
        "lru": Replay(capacity_blocks, LeastRecentlyUsed).run(requests),
        "shoal": Replay(capacity_blocks).run(requests),
    }
    for name, tree_policy in PUBLISHED.items() if with_published else ():
        scores[name] = Replay(capacity_blocks, tree_policy=tree_policy).run(requests)
    ratios = {name: _total(one).ratio for name, one in scores.items()}
    return {
        "seed": mix.seed,
        "capacity_blocks": capacity_blocks,
        **ratios,
        "points_over_lru": 100 * (ratios["shoal"] - ratios["lru"]),
        "optimum_is_below": optimum_bound(requests, capacity_blocks),
        "by_kind": {name: {kind: one.ratio for kind, one in kinds.items()} for name, kinds in scores.items()},
        **_facts(requests),
    }


def main() -> int:
    """Replay and report."""
    runs = [compare(Mix(seed=seed), CAPACITY_BLOCKS, with_published=True) for seed in SEEDS]
    others = [compare(Mix(seed=SEEDS[0]), size) for size in OTHER_SIZES]
    others.append(compare(OTHER_MIX, CAPACITY_BLOCKS))
    bars = []
    for run in runs:
        lru, points, seed = float(str(run["lru"])), float(str(run["points_over_lru"])), run["seed"]
        bars += [
            Bar(name=f"lru_hit_ratio_from_{seed}", value=lru, want=0.5, sense="at least", unit=""),
            Bar(name=f"lru_hit_ratio_to_{seed}", value=lru, want=0.7, sense="at most", unit=""),
            Bar(name=f"points_over_lru_{seed}", value=points, want=5, sense="at least", unit=""),
        ]
    return finish(
        "kv_traces",
        workload={"mix": asdict(Mix()), "seeds": SEEDS, "other_mix": asdict(OTHER_MIX)},
        bars=bars,
        figures={"runs": runs, "others": others},
    )


def _facts(requests: Sequence[Request]) -> dict[str, object]:
    """Of what the traffic is made."""
    seen: set[int] = set()
    asked: Counter[str] = Counter()
    new: Counter[str] = Counter()
    for request in requests:
        asked[request.kind] += request.prompt.end
        piece: Piece | None = request.prompt
        while piece is not None and piece.number not in seen:
            seen.add(piece.number)
            new[request.kind] += piece.end - piece.begin
            piece = piece.parent
        seen.add(request.answer.number)
    return {
        "requests": len(requests),
        "median_prompt_tokens": int(np.median([one.prompt.end for one in requests])),
        "reuse": 1 - new.total() / asked.total(),
        "scan_share_of_prompt_tokens": asked["scan"] / asked.total(),
        "scan_share_of_new_tokens": new["scan"] / new.total(),
    }


def _total(scores: dict[str, Score]) -> Score:
    return Score(sum(one.usable_tokens for one in scores.values()), sum(one.prompt_tokens for one in scores.values()))


def _snapshot_blocks(length: int) -> int:
    return max(0, length - REPLAY_LENGTH) // BLOCK_TOKENS


def _entry(hashes: Sequence[bytes], place: int, kind: Kind) -> Entry:
    parent = hashes[place - 1] if place else bytes(32)
    form = _BLOCK if kind is Kind.BLOCK else _SNAPSHOT
    return Entry(Key(kind, hashes[place]), _GROUP, parent, (place + 1) * BLOCK_TOKENS, form, 0)


def _name(key: Key) -> bytes:
    return key.block_hash if key.kind is Kind.BLOCK else key.block_hash + _SNAPSHOT_MARK


def _key(name: bytes) -> Key:
    return Key(Kind.BLOCK, name) if len(name) == 32 else Key(Kind.SNAPSHOT, name[:32])


def _item(entry: Entry) -> Item:
    parent = entry.parent_hash if entry.key.kind is Kind.BLOCK else entry.key.block_hash
    return Item(_name(entry.key), parent, entry.size_bytes)


if __name__ == "__main__":
    sys.exit(main())
