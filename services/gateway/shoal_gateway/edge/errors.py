"""What the edge refuses. The reason is the machine-readable code: 429 is the caller's quota, never our capacity."""

from __future__ import annotations

from shoal_common.errors import QuotaExceeded, Unauthenticated


class InvalidApiKey(Unauthenticated):
    """No key, or none that is valid: one that never was, one that was taken out and one that expired look alike."""

    reason = "INVALID_API_KEY"


class ConcurrencyExceeded(QuotaExceeded):
    """As many requests of the key as it may have are under way; one counts from its head to the end of its answer."""

    reason = "CONCURRENCY_EXCEEDED"


class RequestsPerMinute(QuotaExceeded):
    """The key's requests of the last minute."""

    reason = "REQUESTS_PER_MINUTE"


class InputTokensPerMinute(QuotaExceeded):
    """The key's input tokens of the last minute."""

    reason = "INPUT_TOKENS_PER_MINUTE"


class OutputTokensPerMinute(QuotaExceeded):
    """The key's output tokens of the last minute, what running requests may still use included."""

    reason = "OUTPUT_TOKENS_PER_MINUTE"
