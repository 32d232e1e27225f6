"""`shoal-mock-rank`: a decode worker without a model, for load tests and faults. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass

from shoal_common import identity, settings
from shoal_common import process as processes
from shoal_common.bus import Bus
from shoal_common.process import Process
from shoal_common.settings import Loaded

from shoal_decode_worker.config import ServingConfig
from shoal_decode_worker.engine_like import STEP_TOKENS, LocalPrefill
from shoal_decode_worker.generation import EngineFacts
from shoal_decode_worker.mock_engine import MockEngine
from shoal_decode_worker.mock_model import MockModel
from shoal_decode_worker.worker import DecodeWorker

SERVICE = "mock_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class MockRankConfig(ServingConfig):
    """Settings SHOAL_MOCK_RANK_*.

    model               name it answers to
    ms_per_token        time that one token of a choice takes; 0: none at all
    tokens_per_step     1 to 6, as with that many accepted drafts less one
    lowest_token_id     tokens come from here up to the vocabulary's end
    eos_token_id        ends a choice unless it ignores that
    """

    model: str = "shoal-nano"
    vocab_size: int = 4096
    lowest_token_id: int = 0
    eos_token_id: int = 1
    max_context: int = 8192
    block_count: int = 16384
    slot_count: int = 256
    ms_per_token: float = 0.0
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        self.check("SHOAL_MOCK_RANK")
        if not 1 <= self.tokens_per_step <= STEP_TOKENS:
            raise ValueError(f"SHOAL_MOCK_RANK_TOKENS_PER_STEP must be 1 to {STEP_TOKENS}, got {self.tokens_per_step}")
        if not 0 <= self.lowest_token_id < self.vocab_size:
            raise ValueError(
                f"SHOAL_MOCK_RANK_LOWEST_TOKEN_ID must be below the vocabulary size, got {self.lowest_token_id}"
            )
        if self.ms_per_token < 0:
            raise ValueError(f"SHOAL_MOCK_RANK_MS_PER_TOKEN must not be negative, got {self.ms_per_token}")
        for name in ("max_context", "block_count", "slot_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"SHOAL_MOCK_RANK_{name.upper()} must be positive, got {getattr(self, name)}")


def facts_of(config: MockRankConfig) -> EngineFacts:
    """What a mock rank announces: all with the same settings compute the same tokens, and nobody else does."""
    kv_id = identity.kv_id(weights_revision="mock", layout="none", formats="none", tokenizer=config.model)
    numerics_id = identity.numerics_id(
        kv_id=kv_id,
        kernels=f"mock 2 {config.vocab_size} {config.lowest_token_id}",
        accelerator="none",
        parallel="1",
        replay_mode="none",
        replay_tokens=0,
        invariant=True,
    )
    return EngineFacts(
        model=config.model,
        kv_id=kv_id,
        numerics_id=numerics_id,
        draft_id="",
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        block_count=config.block_count,
        slot_count=config.slot_count,
    )


async def serve(process: Process, loaded: Loaded[MockRankConfig]) -> None:
    """Serve until SIGTERM."""
    config = loaded.service
    model = MockModel(
        vocab_size=config.vocab_size, lowest_token_id=config.lowest_token_id, eos_token_id=config.eos_token_id
    )
    step_s = config.ms_per_token * config.tokens_per_step / 1000
    engine = MockEngine(facts_of(config), model, step_s=step_s, step_tokens=config.tokens_per_step)
    worker = DecodeWorker(
        process=process,
        shared=loaded.shared,
        bus=Bus(loaded.shared.nats_url, name=process.instance_id),
        config=config,
        engine=engine,
        loader=LocalPrefill(engine),
        labels={},
    )
    stepping = asyncio.create_task(engine.run())

    async def prepare() -> None:
        """A mock is ready at once."""

    try:
        await worker.serve(prepare)
    finally:
        stepping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stepping


def main() -> None:
    """Console script."""
    loaded = settings.load_or_exit(MockRankConfig, service=SERVICE, environ=os.environ, argv=sys.argv[1:])
    process = processes.begin(SERVICE, loaded)
    processes.run(process, serve(process, loaded))


if __name__ == "__main__":
    main()
