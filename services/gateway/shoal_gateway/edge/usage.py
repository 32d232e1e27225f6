"""What was used by whom: one line a request, and metrics by key."""

from __future__ import annotations

import logging

from shoal_common import logs
from shoal_common.telemetry import Metrics

from shoal_gateway.edge.caller import Departure

logger = logging.getLogger(__name__)

MAX_KEY_LABELS = 1000
"""Keys with a label of their own; the later ones share OTHERS."""
OTHERS = "(others)"
NOBODY = "(none)"
"""Label of what comes without a key. No key can have a name with parentheses."""


class UsageBook:
    """Logs and counts. Invariant: every opened request is recorded once, however it ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counts(
            "key_requests", "Requests opened, by key and how they ended", ("key", "outcome")
        )
        self._tokens = metrics.counts(
            "key_tokens", "Tokens of ended requests, by key; input that was cached apart from the rest", ("key", "kind")
        )
        self._refusals = metrics.counter("key_refusals", "Requests refused by a limit of their key", ("key", "reason"))
        self._strangers = metrics.counter("unauthenticated_requests", "Requests refused for want of a valid API key")
        self._reloads = metrics.counter("api_key_reloads", "Changes of the keys file, taken or not", ("outcome",))
        self._keys = metrics.gauge("api_keys", "API keys in force")
        self._labels: set[str] = set()

    def record(self, key_id: str, api: str, one: Departure) -> None:
        """A request is over."""
        usage, label = one.usage, self._label(key_id)
        self._requests.of(label, one.outcome).inc()
        cached = usage.cached_prompt_tokens
        self._tokens.of(label, "input").inc(usage.prompt_tokens - cached)
        self._tokens.of(label, "cached_input").inc(cached)
        self._tokens.of(label, "output").inc(usage.completion_tokens)
        line = {
            "request_id": one.answer.request_id,
            "key": key_id,
            "api": api,
            "outcome": one.outcome,
            "attempts": one.answer.attempts,
            "duration_s": round(one.duration_s, 3),
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": cached,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        }
        logs.tell(logger, "usage", line)

    def refused(self, key_id: str, reason: str) -> None:
        """A limit of the key was reached."""
        self._refusals.labels(self._label(key_id), reason).inc()

    def stranger(self) -> None:
        """Somebody without a valid key."""
        self._strangers.inc()

    def keys_in_force(self, count: int) -> None:
        """So many keys are known now."""
        self._keys.set(count)

    def reloaded(self, is_taken: bool) -> None:
        """The keys file changed."""
        self._reloads.labels("taken" if is_taken else "refused").inc()

    def _label(self, key_id: str) -> str:
        if not key_id:
            return NOBODY
        if key_id in self._labels:
            return key_id
        if len(self._labels) >= MAX_KEY_LABELS:
            return OTHERS
        self._labels.add(key_id)
        return key_id
