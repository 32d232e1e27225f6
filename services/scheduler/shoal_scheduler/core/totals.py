"""What happened since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal_scheduler.core.messages import DenialReason


@dataclass(slots=True)
class Totals:
    """Counts for the metrics. All only grow."""

    placements: int = 0
    remote_prefills: int = 0
    prompt_tokens: int = 0
    expected_hit_tokens: int = 0
    refusals: int = 0
    losses: int = 0
    denials: Counter[DenialReason] = field(default_factory=Counter)

    def placed(self, *, prompt_tokens: int, hit_tokens: int, is_remote: bool) -> None:
        """A placement was made."""
        self.placements += 1
        self.remote_prefills += is_remote
        self.prompt_tokens += prompt_tokens
        self.expected_hit_tokens += hit_tokens
