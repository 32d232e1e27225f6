"""Which node owns a segment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_SCORE_BYTES = 8
_MAX_KNOWN = 65_536


class Ring:
    """Owners by rendezvous hash over a fixed set of nodes.

    Invariants: the answer depends on the set alone, not on its order nor on who asks; without one node every segment
    that it did not own keeps its owners in their order; a node more takes an equal share from each of the others.
    """

    def __init__(self, node_ids: Iterable[str], *, copies: int) -> None:
        """copies: owners of a segment, best first; fewer while there are fewer nodes."""
        self.node_ids = tuple(sorted(set(node_ids)))
        self._copies = copies
        self._states = [
            (node_id, hashlib.blake2b(_prefixed(node_id), digest_size=_SCORE_BYTES)) for node_id in self.node_ids
        ]
        self._known: dict[bytes, tuple[str, ...]] = {}

    def owners(self, first_hash: bytes) -> tuple[str, ...]:
        """The owners of a segment, best first; empty only where there is no node."""
        found = self._known.get(first_hash)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[first_hash] = self._compute(first_hash)
        return found

    def _compute(self, first_hash: bytes) -> tuple[str, ...]:
        scored = []
        for node_id, state in self._states:
            score = state.copy()
            score.update(first_hash)
            scored.append((score.digest(), node_id))
        scored.sort(reverse=True)
        return tuple(node_id for _, node_id in scored[: self._copies])


def _prefixed(node_id: str) -> bytes:
    raw = node_id.encode()
    return len(raw).to_bytes(4, "little") + raw
