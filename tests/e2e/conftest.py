"""The two workers and a kv_cache node as real processes on the tiny golden model, shared by all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.service_process import service_process
from support.worker_pair import TINY, WorkerPair, wait_until_ready


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPair]:
    logs = tmp_path_factory.mktemp("pair")
    with service_process("shoal_kv_cache", log=logs / "kv_cache") as kv_cache:
        prefill_settings = {
            "SHOAL_PREFILL_WORKER_MODEL": str(TINY),
            "SHOAL_PREFILL_WORKER_STEP_TOKENS": "64",
            "SHOAL_PREFILL_WORKER_KV_CACHE_ADDRESS": kv_cache.address,
        }
        decode_settings = {
            "SHOAL_DECODE_WORKER_MODEL": str(TINY),
            "SHOAL_DECODE_WORKER_LOCAL_PREFILL_TOKENS": "0",
            "SHOAL_DECODE_WORKER_KV_CACHE_ADDRESS": kv_cache.address,
            "SHOAL_DECODE_WORKER_PREFILL_HIT_TIMEOUT_S": "2",
        }
        with (
            service_process("shoal_prefill_worker", log=logs / "prefill", environment=prefill_settings) as prefill,
            service_process("shoal_decode_worker", log=logs / "decode", environment=decode_settings) as decode,
        ):
            wait_until_ready(prefill, timeout_s=240)
            wait_until_ready(decode, timeout_s=240)
            yield WorkerPair(decode=decode, prefill=prefill, kv_cache=kv_cache, logs=logs)
