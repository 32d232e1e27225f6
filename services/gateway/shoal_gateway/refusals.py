"""What the gateway refuses by itself, and why."""

from __future__ import annotations

from shoal_common.errors import (
    DeadlineExceeded,
    FieldViolation,
    InvalidArgument,
    MeshError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)


class ModelNotFound(NotFound):
    """No model of that name is served here."""

    reason = "MODEL_NOT_FOUND"


class ContextLengthExceeded(InvalidArgument):
    """Prompt and output together do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


def too_long(error: ContextLengthExceeded, prompt_field: str, max_tokens_field: str) -> ContextLengthExceeded:
    """`error` naming the prompt if that alone is too long, else the length asked for."""
    has_room = int(error.metadata["prompt_tokens"]) < int(error.metadata["context_tokens"])
    error.violations = (FieldViolation(max_tokens_field if has_room else prompt_field, error.message),)
    return error


class NeverFits(InvalidArgument):
    """No worker has room for the request, and none will have."""

    reason = "EXCEEDS_CAPACITY"


class BodyTooLarge(ResourceExhausted):
    """The request's body is over the limit."""

    reason = "BODY_TOO_LARGE"


class SlowWriter(DeadlineExceeded):
    """The client does not send the request that it began."""

    reason = "SLOW_WRITER"


class MethodNotAllowed(InvalidArgument):
    """The path exists, the method is wrong."""

    reason = "METHOD_NOT_ALLOWED"


class NoSuchPath(NotFound):
    """Nothing is served there."""

    reason = "NOT_FOUND"


class NoCapacity(Unavailable):
    """The mesh cannot run the request now."""

    reason = "NO_CAPACITY"


class ExactnessLost(Unavailable):
    """A running answer had to be exact, and nobody is left who computes the same bits: a new request begins anew."""

    reason = "EXACTNESS_LOST"


class Overloaded(Unavailable):
    """This gateway holds as many requests as it may."""

    reason = "OVERLOADED"


_NEVER = {"EXCEEDS_CAPACITY": NeverFits, "UNKNOWN_MODEL": ModelNotFound}
_MESSAGES = {
    "EXCEEDS_CAPACITY": "prompt and max_tokens of all choices together fit no worker",
    "UNKNOWN_MODEL": "no worker serves this model",
    "QUEUE_FULL": "too many requests are waiting; try again later",
    "NO_WORKERS": "no decode worker is up; try again later",
    "NO_SCHEDULER": "no scheduler is up; try again later",
    "DEADLINE": "the request waited as long as it may for a worker",
    "TOO_MANY_ATTEMPTS": "several workers refused the request; try again later",
}


def denied(reason: str, retry_after_s: float | None) -> MeshError:
    """What a scheduler's denial means for the client."""
    message = _MESSAGES.get(reason, "no capacity for the request; try again later")
    never = _NEVER.get(reason)
    if never is not None:
        return never(message, reason=never.reason)
    return NoCapacity(message, reason=reason or None, retry_after_s=1.0 if retry_after_s is None else retry_after_s)
