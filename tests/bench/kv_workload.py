"""Synthetic traffic to a prefix cache: agents with tool loops and pauses, chats that end, and a scan mixed in.

A chain is a path of pieces: what one message added. So a policy can be tried on pieces, thousands of times fewer than
blocks, and the index be replayed on the blocks of the very same requests.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shoal_kv_cache.core.entries import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message added to a chain; `end` is the length in tokens of the chain up to and with it."""

    number: int
    parent: Piece | None
    end: int

    @property
    def begin(self) -> int:
        """Where it begins."""
        return self.parent.end if self.parent else 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its prompt ends with one piece, its answer is the next."""

    arrived_s: float
    finished_s: float
    prompt: Piece
    answer: Piece
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the traffic is made of. Times in seconds, lengths in tokens; medians of log-normal draws.

    agents, chats     sessions begun per hour
    scan_jobs         per hour, evenly spread, so that every trace has its share of them; each reads `scan_documents`
                      documents once, one after the other
    apps              different system prompts of agents, the first by far the most used
    turns             requests of a session in the mean; a session may end after any
    person_share      agents' turns that a person answers; a tool answers the others
    retry_share       agents' turns that are tried again: a branch from before the last answer
    context_limit     where an agent starts anew with a summary
    preamble_tokens   with which everything begins, scans too: then no one can be told from another by how it begins
    """

    hours: float = 10.0
    agents: float = 18.0
    chats: float = 26.0
    scan_jobs: float = 1.9
    scan_documents: int = 30
    scan_tokens: int = 50_000
    scan_every_s: float = 5.0
    apps: int = 12
    agent_turns: float = 40.0
    chat_turns: float = 10.0
    tool_pause_s: float = 15.0
    person_pause_s: float = 300.0
    chat_pause_s: float = 180.0
    person_share: float = 0.15
    retry_share: float = 0.06
    context_limit: int = 180_000
    preamble_tokens: int = 0
    seed: int = 1


class Traffic:
    """Draws sessions and puts their requests in order of time."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._random = random.Random(mix.seed)
        self._pieces = 0
        self._preamble = self._piece(None, mix.preamble_tokens) if mix.preamble_tokens else None
        self._apps = [self._piece(self._preamble, self._length(12_000, 0.5)) for _ in range(mix.apps)]
        self._chat_prompt = self._piece(self._preamble, 1_500)

    def requests(self) -> list[Request]:
        """All requests by arrival; sessions that last longer are cut off."""
        found: list[Request] = []
        for per_hour, session in ((self._mix.agents, self._agent), (self._mix.chats, self._chat)):
            at_s = 0.0
            while (at_s := at_s + self._random.expovariate(per_hour / 3600)) < self._mix.hours * 3600:
                found += session(at_s)
        for number in range(int(self._mix.hours * self._mix.scan_jobs)):
            found += self._scan((number + self._random.random()) * 3600 / self._mix.scan_jobs)
        in_time = (one for one in found if one.arrived_s < self._mix.hours * 3600)
        return sorted(in_time, key=lambda one: one.arrived_s)

    def _agent(self, at_s: float) -> Iterator[Request]:
        mix, draw = self._mix, self._random
        app = self._apps[min(int(draw.expovariate(0.35)), mix.apps - 1)]
        prompt = self._piece(app, self._length(25_000, 0.7))
        while True:
            request = self._request(at_s, prompt, self._length(250, 0.8), "agent")
            yield request
            if draw.random() < 1 / mix.agent_turns:
                return
            is_person = draw.random() < mix.person_share  # reads, approves or answers; otherwise a tool runs
            pause_s = self._length(mix.person_pause_s, 1.2) if is_person else self._length(mix.tool_pause_s, 1.2)
            at_s = request.finished_s + pause_s
            is_retry = draw.random() < mix.retry_share
            prompt = self._piece(prompt if is_retry else request.answer, self._length(1_200, 1.0))
            if prompt.end > mix.context_limit:
                prompt = self._piece(app, self._length(8_000, 0.5))

    def _chat(self, at_s: float) -> Iterator[Request]:
        mix, draw = self._mix, self._random
        before = self._chat_prompt
        if draw.random() < 0.7:
            before = self._piece(before, self._length(55_000, 0.7))
        while True:
            request = self._request(at_s, self._piece(before, self._length(300, 0.8)), self._length(500, 0.7), "chat")
            yield request
            if draw.random() < 1 / mix.chat_turns:
                return
            before = request.answer
            at_s = request.finished_s + self._length(mix.chat_pause_s, 1.4)

    def _scan(self, at_s: float) -> Iterator[Request]:
        mix = self._mix
        task = self._piece(self._preamble, self._length(700, 0.5))
        for _ in range(mix.scan_documents):
            yield self._request(at_s, self._piece(task, self._length(mix.scan_tokens, 0.7)), 300, "scan")
            at_s += self._random.expovariate(1 / mix.scan_every_s)

    def _request(self, at_s: float, prompt: Piece, answer_tokens: int, kind: str) -> Request:
        return Request(at_s, at_s + 0.5 + answer_tokens / 60, prompt, self._piece(prompt, answer_tokens), kind)

    def _piece(self, parent: Piece | None, tokens: int) -> Piece:
        self._pieces += 1
        return Piece(self._pieces, parent, (parent.end if parent else 0) + tokens)

    def _length(self, median: float, spread: float) -> int:
        """Log-normal, cut at 16 times less and more."""
        drawn = self._random.lognormvariate(math.log(median), spread)
        return max(1, int(min(max(drawn, median / 16), median * 16, 400_000)))


def path(end: Piece) -> list[Piece]:
    """The pieces of a chain from its first."""
    found: list[Piece] = []
    piece: Piece | None = end
    while piece is not None:
        found.append(piece)
        piece = piece.parent
    return found[::-1]


class Hashes:
    """Hashes of the full blocks of chains: equal as far as chains have the same pieces."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[list[bytes], bytes]] = {}  # of each piece the blocks that end in it, and what is left

    def of(self, end: Piece) -> list[bytes]:
        """All full blocks of a chain."""
        hashes: list[bytes] = []
        rest = b""
        for piece in path(end):
            known = self._of.get(piece.number)
            if known is None:
                known = self._of[piece.number] = _blocks(piece, hashes[-1] if hashes else b"", rest)
            hashes += known[0]
            rest = known[1]
        return hashes


def _blocks(piece: Piece, before: bytes, rest: bytes) -> tuple[list[bytes], bytes]:
    rest += piece.number.to_bytes(4, "little")
    count = piece.end // BLOCK_TOKENS - piece.begin // BLOCK_TOKENS
    if not count:
        return [], rest
    seed = hashlib.sha256(before + rest)
    hashes = []
    for number in range(count):
        one = seed.copy()
        one.update(number.to_bytes(4, "little"))
        hashes.append(one.digest())
    return hashes, b""
