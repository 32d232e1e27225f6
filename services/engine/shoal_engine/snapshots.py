"""Window snapshots: where they are cut and which copies a sequence keeps. Pure.

A snapshot at H is the encoder's window rows of positions H - W .. H - 1. The rings have moved on when it is wanted, so
the rows are copied aside when the accepted frontier reaches H. Source: mesh.md sections 4.6 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal_engine.block_pool import BLOCK_TOKENS


def floor_to_block(num_tokens: int) -> int:
    """Greatest multiple of 128 that is at most `num_tokens`; 0 for anything below 128."""
    return max(0, num_tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def snapshot_position(length: int, replay_length: int) -> int:
    """S(L): the greatest multiple of 128 that is <= L - K; 0 where there is none."""
    return floor_to_block(length - replay_length)


def copies_kept(replay_length: int) -> int:
    """Copies per sequence: enough that S(L) is among the last ones at every frontier L."""
    return -(-replay_length // BLOCK_TOKENS) + 1


def prefill_cuts(
    start: int, prompt_length: int, replay_length: int, cache_points: Iterable[int] = (), branch: int = 0
) -> tuple[int, ...]:
    """Positions > `start` at which a prefill stops, so that the rings hold the window that ends there; ascending.

    These are S(Lp), the later multiples of 128 up to Lp (decode needs their copies), S(c) and the last multiple of 128
    of every cache point c, and the last usable multiple of 128 below `branch`, up to where blocks exist in a cache.
    """
    wanted = set(range(snapshot_position(prompt_length, replay_length), prompt_length + 1, BLOCK_TOKENS))
    wanted |= stored_snapshots(prompt_length, replay_length, cache_points, branch)
    return tuple(sorted(cut for cut in wanted if start < cut <= prompt_length and cut > 0))


def stored_snapshots(
    prompt_length: int, replay_length: int, cache_points: Iterable[int] = (), branch: int = 0
) -> set[int]:
    """Positions whose snapshot a prefill stores: those of `prefill_cuts` without the copies that only decode needs."""
    last = snapshot_position(prompt_length, replay_length)
    stored = {last}
    for point in cache_points:
        point = min(point, prompt_length)
        stored |= {snapshot_position(point, replay_length), floor_to_block(point)}
    stored.add(min(floor_to_block(branch), last))
    return stored - {0}


def window_pieces(prompt_length: int, replay_length: int, window: int) -> tuple[tuple[int, int], ...]:
    """Position ranges [low, high) of the encoder window rows that a hand-over carries, ascending and disjoint.

    Together they hold the window of the prompt's end and those of every multiple of 128 in (S(Lp), Lp]. Each ends where
    a prefill stops anyway. Where W is 128 they are S(Lp) .. Lp - 1 (at most K + 127 positions) without a gap.
    """
    first = snapshot_position(prompt_length, replay_length) + BLOCK_TOKENS
    pieces: list[tuple[int, int]] = []
    done = 0
    for end in sorted({*range(first, prompt_length + 1, BLOCK_TOKENS), prompt_length}):
        pieces.append((max(end - window, done), end))
        done = end
    return tuple(pieces)


class WindowCopies:
    """Window rows copied aside by one sequence, by the position they end at.

    Invariant: at most `limit` copies, those of the greatest positions.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[int, bytes] = {}

    def add(self, position: int, rows: bytes) -> None:
        """Keep the copy at `position`; the one of the lowest position goes when there are too many."""
        self._rows[position] = rows
        while len(self._rows) > self._limit:
            del self._rows[min(self._rows)]

    def get(self, position: int) -> bytes | None:
        """The copy at `position`, if it is kept."""
        return self._rows.get(position)

    def positions(self) -> tuple[int, ...]:
        """Positions of the copies, ascending."""
        return tuple(sorted(self._rows))

    def clone(self) -> WindowCopies:
        """The same copies for another sequence with the same prefix; the bytes are shared."""
        other = WindowCopies(self._limit)
        other._rows = dict(self._rows)
        return other
