"""Settings of a decode worker, and the part of them that a mock rank shares."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_model.device import parse_device

VERIFY = ("planned", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """What a decode worker and a mock rank have in common. Lengths of time in seconds.

    advertised_address    host:port that others reach this worker by; empty: the one it listens on
    beat_s               between two beats on a Frames stream
    gateway_expiry_s     silence after which a gateway's requests are aborted
    max_requests         Generate calls open at once
    max_gateways         Frames streams open at once
    drain_grace_s        from SIGTERM to the end; what then still runs is moved `drain_move_s` before
    """

    listen_address: str = "127.0.0.1:0"
    admin_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    beat_s: float = 1.0
    gateway_expiry_s: float = 30.0
    max_requests: int = 1024
    max_gateways: int = 256
    drain_grace_s: float = 10.0
    drain_move_s: float = 2.0

    def check(self, prefix: str) -> None:
        """Raise ValueError with the variable's name for a value out of range."""
        for name in ("beat_s", "gateway_expiry_s", "max_requests", "max_gateways"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{prefix}_{name.upper()} must be positive, got {value}")
        if not 0 <= self.drain_move_s <= self.drain_grace_s:
            raise ValueError(f"{prefix}_DRAIN_MOVE_S must be in [0, drain_grace_s], got {self.drain_move_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerConfig(ServingConfig):
    """SHOAL_DECODE_WORKER_<FIELD>.

    model                checkpoint folder, or "nano" for the one that comes with Shoal
    model_name           what clients call it; empty: the folder's name
    device               where the model runs: cpu, cuda or cuda:N
    block_count          KV blocks of 128 tokens
    slot_count           choices that run at once
    max_context          positions of prompt + output; 0: the model's
    replay_length        K; 0: window + 2 * backtrack
    step_tokens          rows of one step
    verify               planned: as many drafts are verified as pay, by measured costs and the draft head's
                         confidences; fixed: all. Changes the speed, never the tokens; so do the settings down to
                         round_log
    verify_width         drafts made and verified per choice and step at most; 0 makes none
    verify_delayed       a step's number of drafts is planned from the confidences of the step before last
    cost_directory       folder of measured step costs; empty: .cache/shoal/step-costs of the user
    cost_ttl_s           age from which step costs are measured again
    profile_s            seconds that measuring them takes, about
    calibration          file that `shoal model calibrate` wrote; empty: calibration.json beside the checkpoint, if any
    round_log            file to log draft rounds to, for `shoal model calibrate`; all drafts are verified then
    threads              threads of one step; 0 leaves it to the kernels
    compile_s            seconds after which no further kernel of an accelerator is compiled ahead of requests
    constraint_compile_s seconds from a request to its compiled constraint; one that takes longer is refused
    constraint_threads   compile constraints beside the steps
    constraint_cache_bytes    estimated, of compiled constraints kept
    local_prefill_tokens uncached prompt tokens up to which a prompt is always prefilled here
    kv_cache_address     host:port of the kv_cache node; empty: whoever is present, the one of this host first
    write_queue_bytes    blocks and snapshots waiting to be stored; what comes on top is dropped
    prefill_hit_timeout_s, prefill_idle_timeout_s, prefill_timeout_s    to a prefill worker's first answer; between two
                         of its messages; for the whole call
    acquire_timeout_s    for Acquire and Release; pull_timeout_s, put_timeout_s, lease_s likewise
    """

    model: str = "nano"
    model_name: str = ""
    device: str = "cpu"
    block_count: int = 1024
    slot_count: int = 32
    max_context: int = 0
    replay_length: int = 0
    step_tokens: int = 512
    verify: str = "planned"
    verify_width: int = 5
    verify_delayed: bool = False
    cost_directory: str = ""
    cost_ttl_s: float = 7 * 86400.0
    profile_s: float = 3.0
    calibration: str = ""
    round_log: str = ""
    threads: int = 0
    compile_s: float = 200.0
    constraint_compile_s: float = 10.0
    constraint_threads: int = 2
    constraint_cache_bytes: int = 256 << 20
    local_prefill_tokens: int = 256
    kv_cache_address: str = ""
    write_queue_bytes: int = 128 << 20
    prefill_hit_timeout_s: float = 5.0
    prefill_idle_timeout_s: float = 30.0
    prefill_timeout_s: float = 600.0
    acquire_timeout_s: float = 1.0
    pull_timeout_s: float = 10.0
    put_timeout_s: float = 30.0
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        prefix = "SHOAL_DECODE_WORKER"
        self.check(prefix)
        _check_device(prefix, self.device)
        if self.verify not in VERIFY:
            raise ValueError(f"{prefix}_VERIFY must be one of {', '.join(VERIFY)}, got {self.verify!r}")
        for name in ("max_context", "replay_length", "verify_width", "threads", "compile_s", "local_prefill_tokens"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{prefix}_{name.upper()} must not be negative, got {getattr(self, name)}")
        positive = ("block_count", "slot_count", "step_tokens", "write_queue_bytes", "cost_ttl_s", "profile_s")
        constraints = ("constraint_compile_s", "constraint_threads", "constraint_cache_bytes")
        times = ("acquire_timeout_s", "pull_timeout_s", "put_timeout_s", "lease_s")
        prefill_times = ("prefill_hit_timeout_s", "prefill_idle_timeout_s", "prefill_timeout_s")
        for name in (*positive, *constraints, *times, *prefill_times):
            if not getattr(self, name) > 0:
                raise ValueError(f"{prefix}_{name.upper()} must be positive, got {getattr(self, name)}")


def _check_device(prefix: str, device: str) -> None:
    try:
        parse_device(device)
    except ValueError as error:
        raise ValueError(f"{prefix}_DEVICE: {error}") from error
