"""Real processes on the tiny golden model, shared by all tests here: the two workers with a kv_cache, a whole mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shoal_client import Client
from shoal_engine import LLM
from support.collector import Collector, collecting
from support.mesh import Mesh, mesh
from support.service_process import service_process
from support.worker_pair import TINY, PairNode, WorkerPair, wait_until_ready

TEXT = "def harbour(lamp, stone):\n    return [river for river in lamp if river not in stone]\n\n\n" * 60


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPair]:
    logs = tmp_path_factory.mktemp("pair")
    with PairNode(logs) as kv_cache:
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
            yield WorkerPair(decode=decode, prefill=prefill, node=kv_cache, logs=logs)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the spans of `whole`."""
    with collecting() as started:
        yield started


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Mesh]:
    """The five services and NATS: prompts of more than 200 uncached tokens are prefilled remotely."""
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    settings = {
        "scheduler": {"REMOTE_PREFILL_TOKENS": "200", "REPLAY_TOKENS": "28", **traced},
        "decode_worker": {"LOCAL_PREFILL_TOKENS": "64", **traced},
        "prefill_worker": traced,
        "kv_cache": traced,
        "gateway": traced,
    }
    with mesh(tmp_path_factory.mktemp("mesh"), settings) as started:
        yield started


@pytest.fixture(scope="session")
def offline() -> Iterator[LLM]:
    """The same model in this process: the oracle."""
    with LLM(TINY, max_model_len=4096, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def nano() -> Iterator[LLM]:
    """The model that comes with Shoal, in this process."""
    with LLM("nano", threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def text(nano: LLM) -> list[int]:
    """Some Python-like text in nano's tokens."""
    ids: list[int] = nano.get_tokenizer().encode(TEXT).ids
    return ids


@pytest.fixture
def client(whole: Mesh) -> Iterator[Client]:
    """The public gRPC client of the mesh; whatever a test did, nothing is held after it."""
    with Client(whole.grpc, timeout_s=60) as connected:
        yield connected
    whole.wait_idle()
