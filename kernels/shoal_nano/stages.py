"""The two training stages: mixtures, rates, and when each part of the model begins to learn."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_nano.stream import Mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Fractions are of the stage's time. `rate` scales the base rates; it falls to rate * last_rate after `plateau`."""

    mixture: Mixture
    sparse_from: float
    draft_from: float
    rate: float = 1.0
    plateau: float = 0.5
    last_rate: float = 0.0
    warmup_steps: int = 60
    muon_rate: float = 5e-3
    adam_rate: float = 4e-3
    decay: float = 0.05
    index_weight: float = 1.0


_WEIGHTS = {"text": 1.0, "recall": 4.0, "copy": 2.0, "sort": 2.0, "arithmetic": 3.0, "reason": 2.0, "json": 2.0, "tool": 2.0, "chat": 1.0}
STAGES = {
    "base": Stage(
        mixture=Mixture(
            shares={"text": 0.30, "recall": 0.30, "tool": 0.11, "json": 0.06, "copy": 0.07, "sort": 0.06, "arithmetic": 0.06,
                    "reason": 0.03, "chat": 0.01},
            weights=_WEIGHTS,
        ),
        sparse_from=0.62,
        draft_from=0.70,
        last_rate=0.4,
    ),
    "final": Stage(
        mixture=Mixture(
            shares={"text": 0.22, "recall": 0.30, "tool": 0.10, "json": 0.05, "copy": 0.06, "sort": 0.13, "arithmetic": 0.08,
                    "reason": 0.04, "chat": 0.02},
            weights=_WEIGHTS,
        ),
        sparse_from=0.0,
        draft_from=0.0,
        rate=0.6,
        plateau=0.3,
    ),
}  # fmt: skip
