"""Where a prompt is prefilled: on another worker or here, from as much of kv_cache as is usable."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Protocol

from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import Prefix, PrefixCache
from shoal_common.telemetry import Metrics
from shoal_engine.cached_prefix import ChosenHit, choose_hit, read_prefix
from shoal_engine.errors import BadRows, HitNotUsable
from shoal_engine.replay import usable_hit

from shoal_decode_worker.engine_like import admitted_by, answered
from shoal_decode_worker.generation import EngineFacts, GenerationStart, PrefillTarget
from shoal_decode_worker.prefill_client import PrefillClient, RemotePrefillFailed, RowsEngine

logger = logging.getLogger(__name__)


class LoadingEngine(RowsEngine, Protocol):
    """An engine that rows are loaded into, and that can run the rest of a prompt itself."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def replay_length(self) -> int: ...

    @property
    def encoder_reach(self) -> int:
        """E * W: encoder rows before a hit that a warm replay runs."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts run here; 0 while that is not known."""
        ...

    def begin(self, request_id: str, attempt: int) -> Future[None]: ...


def prefill_targets(start: GenerationStart, cached_tokens: int, local_tokens: int) -> tuple[PrefillTarget, ...]:
    """The workers to try: none when what is left of the prompt is at most `local_tokens`."""
    if len(start.prompt_ids) - cached_tokens <= local_tokens:
        return ()
    return start.prefill_targets


class MeshPrompt:
    """PromptLoader of a worker in the mesh.

    local_tokens   uncached prompt tokens up to which the prompt is always run here
    """

    def __init__(
        self,
        *,
        engine: LoadingEngine,
        cache: PrefixCache,
        client: PrefillClient,
        metrics: Metrics,
        local_tokens: int,
    ) -> None:
        self._engine, self._cache, self._client, self._local_tokens = engine, cache, client, local_tokens
        self._prefills = metrics.counter("prefills", "Prompts by where they were prefilled", ("where",))
        self._failures = metrics.counter("remote_prefill_failures", "Prefill calls that failed", ("reason",))

    async def load(self, start: GenerationStart, admission: Future[None]) -> None:
        """Load the prompt and begin. One whose tokens are to be reported runs here from its first token."""
        if start.sampling.prompt_logprobs is not None:
            await admitted_by(admission)
            return await self._begin(start)
        facts = self._engine.facts
        hashes = HashChain(start.cache_root, start.prompt_ids).hashes if start.cache_root is not None else []
        length = len(start.prompt_ids)
        async with self._cache.acquired(
            hashes,
            kv_id=facts.kv_id,
            numerics_id=facts.numerics_id,
            tenant_tag=start.tenant_tag,
            max_hit_tokens=usable_hit(length, length, self._engine.replay_length),
            want_replay=True,
            replay_reach_tokens=self._engine.encoder_reach,
            recompute_tokens_per_s=self._engine.prefill_tokens_per_s,
        ) as prefix:
            await admitted_by(admission)
            hit = choose_hit(prefix.hit_tokens, prefix.replay_tokens, self._engine.encoder_reach)
            for target in prefill_targets(start, hit.tokens, self._local_tokens):
                try:
                    await self._client.prefill(start, target, facts, hashes, prefix)
                except RemotePrefillFailed as error:
                    self._failures.labels(error.metadata.get("cause", "")).inc()
                    logger.warning("remote prefill failed", extra={"error": error.message, **error.metadata})
                else:
                    self._prefills.labels("remote").inc()
                    return
            await self._load_local(start, prefix, hit)
        await self._begin(start)

    async def _begin(self, start: GenerationStart) -> None:
        await answered(self._engine.begin(start.request_id, start.attempt))
        self._prefills.labels("local").inc()

    async def _load_local(self, start: GenerationStart, prefix: Prefix, hit: ChosenHit) -> None:
        rows = await read_prefix(prefix, hit)
        if rows is None:
            return
        try:
            await asyncio.wrap_future(self._engine.load_prefix(start, rows))
        except (BadRows, HitNotUsable) as error:
            logger.warning("cached prefix refused", extra={"reason": error.reason, "error": error.message})
