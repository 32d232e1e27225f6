"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_common.settings import SECRET

from shoal_gateway.edge import rule

_POSITIVE = (
    "max_in_flight",
    "max_body_bytes",
    "keep_alive_s",
    "admission_s",
    "start_timeout_s",
    "scheduler_wait_s",
    "request_timeout_s",
    "head_timeout_s",
    "read_timeout_s",
    "write_timeout_s",
    "drain_grace_s",
    "worker_silence_s",
    "worker_standstill_s",
    "output_reservation_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Every setting, as SHOAL_GATEWAY_<NAME>."""

    http_address: str = "127.0.0.1:8000"
    """Where HTTP is served; port 0 takes a free one."""
    listen_address: str = "127.0.0.1:8001"
    """Where gRPC is served."""
    admin_address: str = "127.0.0.1:0"
    advertised_address: str = ""
    """What other instances call; empty: the listen address."""
    model: str = ""
    """Folder with config.json and tokenizer.json; empty: the model that comes with Shoal."""
    model_name: str = "deepseek-flash"
    model_aliases: tuple[str, ...] = ("deepseek-chat", "deepseek-reasoner", "DeepSeek-V4.1-Flash")
    worker_model: str = ""
    """The model that workers announce and requests are placed on; empty: any."""
    max_in_flight: int = 1024
    """Requests held at once; more are refused with 503."""
    max_body_bytes: int = 32 * 1024 * 1024
    keep_alive_s: float = 10.0
    """Longest silence on a stream before a comment says that we are still there."""
    admission_s: float = 10.0
    """A stream's status is sent when a worker has admitted the request, or after so long."""
    start_timeout_s: float = 600.0
    """A request whose output has not begun by then is refused."""
    scheduler_wait_s: float = 10.0
    """A new request is refused with 503 when no scheduler is up for so long."""
    request_timeout_s: float = 3600.0
    head_timeout_s: float = 30.0
    """A connection whose request's head is not complete so long after its first byte is closed; for the first request
    the time counts from the connection."""
    read_timeout_s: float = 60.0
    """A client that sends nothing of its body for so long is cut."""
    write_timeout_s: float = 60.0
    """A client that takes nothing for so long is cut."""
    drain_grace_s: float = 30.0
    worker_silence_s: float = 4.0
    """A worker without a beat for so long counts as stopped."""
    worker_standstill_s: float = 60.0
    """A worker that has work and makes no step for so long counts as hung."""
    reflection: bool = True
    auth: rule.Auth = "auto"
    """Whether callers need an API key. auto: if there are keys, and there must be some unless both listen addresses are
    loopback; required: there must be some; off: never."""
    api_keys_file: str = ""
    """TOML file of keys and their limits; followed while the gateway runs."""
    api_keys: tuple[str, ...] = field(default=(), metadata=SECRET)
    """Keys without limits, as ID=sha256:HEX by commas."""
    output_reservation_tokens: int = 4096
    """Of a key's output tokens per minute, each choice reserves its max_tokens, but at most so many; what it uses
    beyond is owed."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"SHOAL_GATEWAY_{name.upper()} must be positive, got {getattr(self, name)}")
        for name in ("http_address", "listen_address", "admin_address"):
            host, _, port = getattr(self, name).rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"SHOAL_GATEWAY_{name.upper()} must be HOST:PORT, got {getattr(self, name)!r}")
        if not self.model_name:
            raise ValueError("SHOAL_GATEWAY_MODEL_NAME must not be empty")
        # Refuses what would let strangers in.
        _ = self.asks_for_keys

    @property
    def is_local(self) -> bool:
        """Only this machine reaches it."""
        return rule.is_loopback(self.http_address) and rule.is_loopback(self.listen_address)

    @property
    def asks_for_keys(self) -> bool:
        """Callers need an API key."""
        return rule.asks_for_keys(
            self.auth,
            has_keys=bool(self.api_keys or self.api_keys_file),
            addresses={
                "SHOAL_GATEWAY_HTTP_ADDRESS": self.http_address,
                "SHOAL_GATEWAY_LISTEN_ADDRESS": self.listen_address,
            },
        )
