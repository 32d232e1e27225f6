"""Synthetic traffic to a prefix cache: agents with tool loops, chats about documents, and a scan mixed in."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_TOKENS = 1024
"""Of a block here: eight of the cache's, so that a trace is replayed eight times faster."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: hashes of the full blocks of prompt and answer, and how many tokens each has."""

    arrived_s: float
    finished_s: float
    hashes: tuple[bytes, ...]
    prompt_tokens: int
    answer_tokens: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the traffic is made of.

    sessions_per_hour  begun by agents and by chats
    scan_per_hour      one-off prompts as long as the others
    """

    hours: float = 2.5
    agents_per_hour: float = 70.0
    chats_per_hour: float = 100.0
    scan_per_hour: float = 130.0
    apps: int = 12
    seed: int = 1


class _Stream:
    """Tokens of one conversation as block hashes: what is added to equal streams gives equal hashes only by name."""

    def __init__(self, hashes: list[bytes], tokens: int, rest: str) -> None:
        self.hashes, self.tokens, self._rest = hashes, tokens, rest

    def add(self, name: str, tokens: int) -> None:
        """`tokens` more, whose content `name` stands for."""
        self.tokens += tokens
        self._rest += f"|{name}:{tokens}"
        count = self.tokens // BLOCK_TOKENS - len(self.hashes)
        if count > 0:
            seed = hashlib.sha256((self.hashes[-1] if self.hashes else b"") + self._rest.encode())
            for number in range(count):
                one = seed.copy()
                one.update(number.to_bytes(4, "little"))
                self.hashes.append(one.digest())
            self._rest = f"{name}@{self.tokens}"

    def fork(self) -> _Stream:
        """The same so far."""
        return _Stream(list(self.hashes), self.tokens, self._rest)


class Traffic:
    """Draws sessions and puts their requests in order of time."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._random = random.Random(mix.seed)
        self._apps = [self._length(12_000, 0.5) for _ in range(mix.apps)]
        self._names = 0

    def requests(self) -> list[Request]:
        """All requests by arrival; sessions that last longer are cut off."""
        found: list[Request] = []
        for per_hour, session in (
            (self._mix.agents_per_hour, self._agent),
            (self._mix.chats_per_hour, self._chat),
            (self._mix.scan_per_hour, self._scan),
        ):
            at_s = 0.0
            while (at_s := at_s + self._random.expovariate(per_hour / 3600)) < self._mix.hours * 3600:
                found += session(at_s)
        in_time = (one for one in found if one.arrived_s < self._mix.hours * 3600)
        return sorted(in_time, key=lambda one: one.arrived_s)

    def _agent(self, at_s: float) -> Iterator[Request]:
        app = min(int(self._random.expovariate(0.35)), self._mix.apps - 1)
        stream = _Stream([], 0, "")
        stream.add(f"app{app}", self._apps[app])
        stream.add(self._name(), self._length(25_000, 0.7))
        for _ in range(1 + int(self._random.expovariate(1 / 40))):
            before = stream.fork()
            request = self._request(at_s, stream, self._length(250, 0.8), "agent")
            yield request
            is_person = self._random.random() < 0.25  # reads, approves or answers; otherwise a tool runs
            pause_s = self._length(300, 1.2) if is_person else self._length(15, 1.2)
            at_s = request.finished_s + pause_s
            if self._random.random() < 0.06:
                stream = before  # tried again, or another branch of the same task
            stream.add(self._name(), self._length(1_200, 1.0))

    def _chat(self, at_s: float) -> Iterator[Request]:
        stream = _Stream([], 0, "")
        stream.add("chat", 1_500)
        if self._random.random() < 0.7:
            stream.add(self._name(), self._length(55_000, 0.7))
        while True:
            stream.add(self._name(), self._length(300, 0.8))
            request = self._request(at_s, stream, self._length(500, 0.7), "chat")
            yield request
            if self._random.random() < 0.08:
                return
            at_s = request.finished_s + self._length(180, 1.4)

    def _scan(self, at_s: float) -> Iterator[Request]:
        stream = _Stream([], 0, "")
        stream.add("batch", 700)
        stream.add(self._name(), self._length(67_000, 0.5))
        yield self._request(at_s, stream, self._length(300, 0.5), "scan")

    def _request(self, at_s: float, stream: _Stream, answer_tokens: int, kind: str) -> Request:
        prompt_tokens = stream.tokens
        stream.add(self._name(), answer_tokens)
        finished_s = at_s + 0.5 + answer_tokens / 60
        return Request(at_s, finished_s, tuple(stream.hashes), prompt_tokens, answer_tokens, kind)

    def _length(self, median: float, spread: float) -> int:
        """Log-normal, cut at 400 times less and 16 times more."""
        drawn = self._random.lognormvariate(math.log(median), spread)
        return max(1, int(min(max(drawn, median / 16), median * 16, 400_000)))

    def _name(self) -> str:
        self._names += 1
        return str(self._names)
