"""What the engine needs of a constraint, as Protocols: compiled elsewhere, one matcher per choice.

A mask is one bit per token id, packed in int32 words, bit i of word w for id 32 * w + i; 1 allows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""[ceil(vocab_size / 32)]."""


class Matcher(Protocol):
    """Where one choice stands in its constraint. A pure function of the tokens it accepted, in order."""

    def fill(self, mask: Mask) -> bool:
        """Write what may come next into `mask`. False: anything may, the mask is not written.

        raises   ConstraintFailed: it runs too long here, or its engine failed; the request fails, no other does
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Go on behind this token. False: the constraint forbids it, nothing changed."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...


class Constraint(Protocol):
    """A compiled constraint, shared by the choices of a request."""

    def matcher(self, *, avoids_end: bool = False) -> Matcher:
        """A matcher before the first output token.

        avoids_end   the end of the sequence is allowed only where nothing else is
        raises       ConstraintFailed
        """
        ...
