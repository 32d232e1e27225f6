"""How many calls may be tried again. Pure."""

from __future__ import annotations


class RetryBudget:
    """Tokens that retries spend and successes earn back, so that an outage is not answered with a flood.

    Invariant: 0 <= tokens <= capacity. With the defaults ten retries may come at once, and one for every ten successes.
    Retry at one layer only, and only errors whose code says that another try may help.
    """

    def __init__(self, *, capacity: float = 10.0, earned_per_success: float = 0.1) -> None:
        if capacity < 1 or not 0 < earned_per_success <= 1:
            raise ValueError(
                f"capacity must be at least 1 and earnings in (0, 1], got {capacity}, {earned_per_success}"
            )
        self._capacity, self._earned = capacity, earned_per_success
        self._tokens = capacity

    @property
    def tokens(self) -> float:
        """What is left."""
        return self._tokens

    def succeeded(self) -> None:
        """A call ended well."""
        self._tokens = min(self._capacity, self._tokens + self._earned)

    def try_spend(self) -> bool:
        """Take what one retry costs. False, and nothing taken, if there is too little: fail the call instead."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
