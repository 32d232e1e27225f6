"""Whether a request sent now would be served."""

from __future__ import annotations

from collections.abc import Callable


class Readiness:
    """Named conditions, all of which must hold. Invariant: ready means no condition is unmet and no drain has begun.

    Alive and ready differ: a process whose model still loads, or that has not reached NATS yet, is only alive.
    Listeners are called in the setter's thread, after each change of the answer.
    """

    def __init__(self, *conditions: str) -> None:
        self._met: dict[str, bool] = dict.fromkeys(conditions, False)
        self._draining = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_ready(self) -> bool:
        """True if every condition holds and the process is not leaving."""
        return not self._draining and all(self._met.values())

    @property
    def is_draining(self) -> bool:
        """True while the process takes no new work because someone asked it to leave."""
        return self._draining

    @property
    def missing(self) -> tuple[str, ...]:
        """What stands in the way of being ready, for people; empty when ready."""
        unmet = tuple(name for name, is_met in self._met.items() if not is_met)
        return (*unmet, "not draining") if self._draining else unmet

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with the answer now and after each change."""
        self._listeners.append(listener)
        listener(self.is_ready)

    def set(self, condition: str, is_met: bool = True) -> None:
        """Say whether a condition holds. Raises KeyError for one that was not named at the start."""
        if condition not in self._met:
            raise KeyError(condition)
        before = self.is_ready
        self._met[condition] = is_met
        self._tell(before)

    def begin_drain(self) -> None:
        """Not ready from here on, until `end_drain`."""
        before = self.is_ready
        self._draining = True
        self._tell(before)

    def end_drain(self) -> None:
        """Take work again."""
        before = self.is_ready
        self._draining = False
        self._tell(before)

    def _tell(self, before: bool) -> None:
        if self.is_ready != before:
            for listener in self._listeners:
                listener(self.is_ready)
