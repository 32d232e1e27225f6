"""How many drafts each choice verifies in a step. Pure. Any answer gives the same tokens; it only changes the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WidthView:
    """What a planner may know of one choice.

    cap          most drafts it can verify: those it has, its remaining tokens, its request's limit
    confidence_logits, margins   of its drafts, see `model_port.Draft`
    """

    cap: int
    confidence_logits: tuple[float, ...]
    margins: tuple[float, ...] = ()


class WidthPlanner(Protocol):
    """Chooses verify widths. `max_width` drafts are made for each choice after a step; 0 makes none."""

    @property
    def max_width(self) -> int: ...

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        """One width per view, each in [0, cap]."""
        ...

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        ...


class FixedWidth:
    """Every choice verifies the same number of drafts, as far as it has them."""

    def __init__(self, width: int) -> None:
        if width < 0:
            raise ValueError(f"verify width must not be negative, got {width}")
        self._width = width

    @property
    def max_width(self) -> int:
        return self._width

    def widths(self, views: Sequence[WidthView]) -> list[int]:
        return [min(self._width, view.cap) for view in views]

    def observe(self, rows: int, seconds: float) -> None:
        """A fixed width learns nothing."""
