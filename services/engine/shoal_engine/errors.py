"""What an engine refuses, and why."""

from __future__ import annotations

from shoal_common.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfCapacity,
    ResourceExhausted,
)


class OutOfBlocks(OutOfCapacity):
    """Fewer KV blocks are free than the request must hold."""

    reason = "OUT_OF_BLOCKS"


class OutOfSlots(OutOfCapacity):
    """Fewer state slots are free than the request has unfinished choices."""

    reason = "OUT_OF_SLOTS"


class NotEnoughMemory(ResourceExhausted):
    """The blocks and slots asked for do not fit into the device's free memory."""

    reason = "NOT_ENOUGH_MEMORY"


class ExceedsCapacity(FailedPrecondition):
    """Prompt and output of all choices would not fit even into an empty engine."""

    reason = "EXCEEDS_CAPACITY"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room in the context for one output token."""

    reason = "PROMPT_TOO_LONG"


class TokenOutOfRange(InvalidArgument):
    """A token id is not in the vocabulary."""

    reason = "TOKEN_OUT_OF_RANGE"


class NothingAllowed(InvalidArgument):
    """Bans, forced tokens and the constraint together leave no token that may come next."""

    reason = "NOTHING_ALLOWED"


class CommandQueueFull(ResourceExhausted):
    """More commands wait for the step thread than the engine keeps."""

    reason = "QUEUE_FULL"


class UnknownRequest(NotFound):
    """No such request is in the engine: never admitted, or ended."""

    reason = "UNKNOWN_REQUEST"


class WrongPhase(FailedPrecondition):
    """The request is past, or not yet at, the point where this is possible."""

    reason = "WRONG_PHASE"


class HitNotUsable(FailedPrecondition):
    """A prefix hit must be a multiple of 128 and leave the replay length of the prompt to compute."""

    reason = "HIT_NOT_USABLE"


class BadRows(DataLoss):
    """Rows loaded into the engine have another size, kind or position than they must; recompute instead."""

    reason = "BAD_ROWS"
