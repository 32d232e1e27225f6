"""Prompts that visit a `KvMesh` again and again, in every way, and what a run without a cache says to each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal_engine import LLM
from shoal_kv_cache.core.rendezvous import Ring
from support.kv_mesh import Asked, KvMesh, Said, Told, ask_offline

WAYS = ((0.0, ""), (1.0, ""), (0.0, "prefill-1"), (1.0, "prefill-1"))
"""Temperature, and where the prompt is run."""
PROMPT_TOKENS, HIT_TOKENS = 700, 512
NONE, ALL = [0] * len(WAYS), [HIT_TOKENS] * len(WAYS)


@dataclass(frozen=True, slots=True)
class Visits:
    """One prompt per way, each stored under a root of its own."""

    mesh: KvMesh
    asked: tuple[Asked, ...]
    cold: tuple[Said, ...]

    def each(self, worker: str = "decode-1") -> Iterator[Told]:
        """Asks one after the other; tokens and log-probabilities are those of the cold run."""
        for asked, cold, (_, prefill) in zip(self.asked, self.cold, WAYS, strict=True):
            told = self.mesh.ask(worker, asked, prefill=prefill)
            assert told.said == cold
            assert told.drafted, "speculative decoding is on"
            yield told

    def cached(self, worker: str = "decode-1") -> list[int]:
        """As `each`: prompt tokens that came from the cache. Everything is stored when it returns."""
        cached = [told.cached for told in self.each(worker)]
        self.mesh.wait_written()
        return cached

    def of(self, tenant: bytes) -> Visits:
        """The same of another tenant, under the same roots."""
        return replace(self, asked=tuple(replace(one, tenant=tenant) for one in self.asked))

    def owned_by(self, owners: Sequence[str], nodes: Sequence[str]) -> Visits:
        """The same under roots of which these nodes, in this order, own the segment."""
        ring = Ring(nodes, copies=len(owners))

        def owned(one: Asked) -> Asked:
            while ring.owners(one.hashes[0]) != tuple(owners):
                one = replace(one, root=secrets.token_bytes(32))
            return one

        return replace(self, asked=tuple(owned(one) for one in self.asked))


@dataclass(frozen=True, slots=True)
class ColdRuns:
    """What the offline model says to a prompt per way."""

    asked: tuple[Asked, ...]
    said: tuple[Said, ...]

    @classmethod
    def of(cls, llm: LLM, text: Sequence[int], prompt_tokens: int = PROMPT_TOKENS) -> ColdRuns:
        """Prompts out of a text."""
        asked = tuple(
            Asked(prompt=tuple(text[3 * number : 3 * number + prompt_tokens]), temperature=temperature, seed=number)
            for number, (temperature, _) in enumerate(WAYS)
        )
        return cls(asked, tuple(ask_offline(llm, asked)))

    def visits(self, mesh: KvMesh) -> Visits:
        """Under roots that nobody has used."""
        return Visits(mesh, tuple(replace(one, root=secrets.token_bytes(32)) for one in self.asked), self.said)
