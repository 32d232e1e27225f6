"""Which prompts this worker prefills: attempts, bound, drain; and whether it can. Pure; one event loop owns it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from shoal_common.errors import (
    AlreadyExists,
    Draining,
    InvalidArgument,
    NumericsMismatch,
    OutOfCapacity,
    Superseded,
)

ROOT_BYTES = 32


class AttemptNotNewer(AlreadyExists):
    """This attempt of the request, or a newer one, runs here."""

    reason = "ATTEMPT_NOT_NEWER"


class QueueFull(OutOfCapacity):
    """As many prompts as this worker takes."""

    reason = "QUEUE_FULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """Identities and sizes of the model served here."""

    model: str
    kv_id: str
    numerics_id: str
    draft_id: str
    vocab_size: int
    max_context: int
    block_count: int
    slot_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStart:
    """One attempt to prefill one prompt.

    prompt_ids   typecode "I"
    cache_root   32 bytes, None: the KV cache is neither read nor written
    """

    request_id: str
    attempt: int
    numerics_id: str
    draft_id: str
    cache_root: bytes | None
    tenant_tag: bytes
    prompt_ids: array[int]
    cache_points: tuple[int, ...]
    priority: int


class Job:
    """One live prefill.

    superseded   set when a newer attempt took its place
    is_done      the prompt has run; its rows may still be pulled
    """

    def __init__(self, start: PromptStart) -> None:
        self.start = start
        self.superseded: Superseded | None = None
        self.is_done = False

    @property
    def key(self) -> str:
        """Names the attempt to the engine, which must never take a late call for an older attempt for a newer one."""
        return f"{self.start.request_id}#{self.start.attempt}"


class Jobs:
    """The live prefills. Invariant: at most one attempt of a request_id, and at most `max_jobs` in all."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._live: dict[str, Job] = {}
        self.is_draining = False

    @property
    def live_count(self) -> int:
        """Prefills from `open` to `close`."""
        return len(self._live)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the live prefills that are not done, as if each began at its start."""
        return sum(len(job.start.prompt_ids) for job in self._live.values() if not job.is_done)

    def open(self, start: PromptStart) -> tuple[Job, Job | None]:
        """Take a prompt in. Returns its job, and the older attempt that must stop.

        Raises AttemptNotNewer, Draining, QueueFull; then nothing has changed.
        """
        older = self._live.get(start.request_id)
        if older is not None and older.start.attempt >= start.attempt:
            raise AttemptNotNewer(
                f"attempt {older.start.attempt} of {start.request_id} runs here, got attempt {start.attempt}",
                request_id=start.request_id,
                running_attempt=older.start.attempt,
                attempt=start.attempt,
            )
        if self.is_draining:
            raise Draining("this worker leaves and takes no new prompts")
        if older is None and len(self._live) >= self._max_jobs:
            raise QueueFull(f"{len(self._live)} prompts are here already", max_jobs=self._max_jobs)
        if older is not None:
            older.superseded = Superseded(f"attempt {start.attempt} of the request came here", attempt=start.attempt)
        job = self._live[start.request_id] = Job(start)
        return job, older

    def close(self, job: Job) -> None:
        """Forget a prefill, however it ended. Safe to repeat."""
        if self._live.get(job.start.request_id) is job:
            del self._live[job.start.request_id]


def check(start: PromptStart, facts: PrefillFacts) -> None:
    """Raise InvalidArgument for a wrong field, NumericsMismatch for a caller that computes other bits."""
    if start.numerics_id != facts.numerics_id:
        raise NumericsMismatch(
            "this worker computes other bits than the caller", wanted=start.numerics_id, numerics_id=facts.numerics_id
        )
    length = len(start.prompt_ids)
    if not start.request_id:
        raise InvalidArgument.at("start.request_id", "must not be empty")
    if start.cache_root is not None and len(start.cache_root) != ROOT_BYTES:
        raise InvalidArgument.at("start.cache_root", f"must be {ROOT_BYTES} bytes")
    if not length:
        raise InvalidArgument.at("start.prompt_ids", "must hold at least one token", reason="EMPTY_PROMPT")
    if length >= facts.max_context:
        raise InvalidArgument.at(
            "start.prompt_ids", f"{length} tokens, the context has {facts.max_context}", reason="PROMPT_TOO_LONG"
        )
    if max(start.prompt_ids) >= facts.vocab_size:
        raise InvalidArgument.at(
            "start.prompt_ids",
            f"token {max(start.prompt_ids)} is not below the vocabulary size {facts.vocab_size}",
            reason="TOKEN_OUT_OF_RANGE",
        )
    if list(start.cache_points) != sorted(set(start.cache_points)):
        raise InvalidArgument.at("start.cache_points", "must ascend")
