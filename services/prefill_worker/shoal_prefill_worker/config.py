"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_model.device import parse_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerConfig:
    """SHOAL_PREFILL_WORKER_<FIELD>. Lengths of time in seconds.

    model                checkpoint folder, or "nano" for the one that comes with Shoal
    model_name           what clients call it; empty: the folder's name
    device               where the model runs: cpu, cuda or cuda:N
    advertised_address    host:port that others reach this worker by; empty: the one it listens on
    block_count          KV blocks of 128 tokens
    slot_count           prompts in prefill at once
    replay_length        K; 0: window + 2 * backtrack
    max_context          positions of a prompt; 0: the model's
    step_tokens          prompt tokens of one step
    threads              threads of one step; 0 leaves it to the kernels
    compile_s            seconds after which no further kernel of an accelerator is compiled ahead of calls
    max_jobs             Prefill calls open at once
    arena_bytes          shared memory for rows on their way; 0: none
    stream_listen_address      host:port of the byte stream by which other hosts pull rows; off: none, they use gRPC
    stream_advertised_address  host:port that they reach it by; empty: the worker's host, the port listened on
    kv_cache_address     host:port of the kv_cache node; empty: whoever is present, the one of this host first
    write_queue_bytes    blocks and snapshots waiting to be stored; what comes on top is dropped
    start_timeout_s      from the begin of a call to its Start
    pulled_timeout_s     from Done to Pulled
    acquire_timeout_s    for Acquire and Release; pull_timeout_s, put_timeout_s, lease_s likewise
    """

    listen_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    model: str = "nano"
    model_name: str = ""
    device: str = "cpu"
    block_count: int = 512
    slot_count: int = 16
    replay_length: int = 0
    max_context: int = 0
    step_tokens: int = 512
    threads: int = 0
    compile_s: float = 200.0
    max_jobs: int = 64
    arena_bytes: int = 256 << 20
    stream_listen_address: str = "127.0.0.1:0"
    stream_advertised_address: str = ""
    kv_cache_address: str = ""
    write_queue_bytes: int = 128 << 20
    start_timeout_s: float = 5.0
    pulled_timeout_s: float = 30.0
    acquire_timeout_s: float = 1.0
    pull_timeout_s: float = 10.0
    put_timeout_s: float = 30.0
    lease_s: float = 60.0
    drain_grace_s: float = 10.0

    def __post_init__(self) -> None:
        _check_device("SHOAL_PREFILL_WORKER", self.device)
        for name in ("block_count", "slot_count", "step_tokens", "max_jobs", "write_queue_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"SHOAL_PREFILL_WORKER_{name.upper()} must be positive, got {getattr(self, name)}")
        for name in ("replay_length", "arena_bytes", "max_context", "threads", "compile_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"SHOAL_PREFILL_WORKER_{name.upper()} must not be negative, got {getattr(self, name)}")
        for name in (
            "start_timeout_s",
            "pulled_timeout_s",
            "acquire_timeout_s",
            "pull_timeout_s",
            "put_timeout_s",
            "lease_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"SHOAL_PREFILL_WORKER_{name.upper()} must be positive, got {getattr(self, name)}")


def _check_device(prefix: str, device: str) -> None:
    try:
        parse_device(device)
    except ValueError as error:
        raise ValueError(f"{prefix}_DEVICE: {error}") from error
