"""A store that fails is left alone for a while. Pure."""

from __future__ import annotations

from shoal_kv_cache.tiers.remote.errors import RemoteResting

_FAILURES = 3
_MIN_REST_S = 1.0
_MAX_REST_S = 30.0


class Circuit:
    """Opens after some failures in a row; then lets one call try each time that the rest is over, and rests longer.

    Invariant: while it rests at most one call is under way that was let in.
    """

    def __init__(
        self, *, failures: int = _FAILURES, min_rest_s: float = _MIN_REST_S, max_rest_s: float = _MAX_REST_S
    ) -> None:
        self._limit, self._min_rest_s, self._max_rest_s = failures, min_rest_s, max_rest_s
        self._failures = 0
        self._rest_s = min_rest_s
        self._rests_until_s: float | None = None
        self._is_trying = False

    @property
    def is_resting(self) -> bool:
        """Whether the last calls failed."""
        return self._rests_until_s is not None

    def enter(self, now_s: float) -> None:
        """A call wants to begin. Raises RemoteResting."""
        if self._rests_until_s is None:
            return
        left_s = self._rests_until_s - now_s
        if left_s > 0:
            raise RemoteResting(f"asked again in {left_s:.1f} s", retry_after_s=left_s)
        # The others wait for what becomes of this one.
        self._rests_until_s, self._is_trying = now_s + self._rest_s, True

    def succeeded(self) -> None:
        """A call was answered, whatever the answer."""
        self._failures, self._rests_until_s, self._rest_s = 0, None, self._min_rest_s
        self._is_trying = False

    def failed(self, now_s: float) -> None:
        """A call was not answered, or the store could not do it."""
        self._failures += 1
        if self._failures < self._limit or (self.is_resting and not self._is_trying):
            # Of calls that were under way together the first few have said it.
            return
        if self._is_trying:
            self._rest_s = min(self._max_rest_s, self._rest_s * 2)
        self._rests_until_s, self._is_trying = now_s + self._rest_s, False
