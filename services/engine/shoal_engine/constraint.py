"""What the engine needs of a constraint, as Protocols: compiled elsewhere, one matcher per choice.

A mask is one bit per token id, packed in int32 words, bit i of word w for id 32 * w + i; 1 allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""[ceil(vocab_size / 32)]."""


class Matcher(Protocol):
    """Where one choice stands in its constraint: behind its output, and behind drafts that were tried since.

    What it says, and whether it fails, is a pure function of the output tokens and the drafts it stands behind, in
    order: never of drafts taken back, or of other choices. A failure behind drafts only means that no more of them can
    be tried; whether the choice fails shows where it stands behind its output alone.
    """

    def fill(self, mask: Mask) -> bool:
        """Write what may come next into `mask`. False: anything may, the mask is not written.

        raises   ConstraintFailed: it costs too much here, or allows nothing. The request fails if it stands behind its
                 output alone
        """
        ...

    def commit(self, token_id: int) -> bool:
        """Go on behind this output token, for good; no draft may be left. False: the constraint forbids it.

        raises   ConstraintFailed: as `fill` here, and the token is not taken
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Go on behind this draft. False: the constraint forbids it, nothing changed. Raises ConstraintFailed."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` drafts."""
        ...


class Constraint(Protocol):
    """A compiled constraint, shared by the choices of a request."""

    def matcher(self, *, avoids_end: bool = False, output: Sequence[int] = ()) -> Matcher:
        """A matcher behind these output tokens.

        avoids_end   the end of the sequence is allowed only where nothing else is
        raises       ConstraintFailed, OutputUnfit
        """
        ...


class OutputUnfit(Exception):
    """The constraint forbids the output token at `place`."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def lead(matcher: Matcher, output: Sequence[int]) -> None:
    """Lead a matcher behind output tokens. Raises ConstraintFailed, OutputUnfit."""
    for place, token in enumerate(output):
        if not matcher.commit(token):
            raise OutputUnfit(place)
