"""What a tier did since the start, for GetStats and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounts:
    """Totals of one tier as the node sees it. `failing_reason` is empty while it works."""

    read_bytes: int = 0
    written_bytes: int = 0
    failure_count: int = 0
    dropped_count: int = 0
    failing_reason: str = ""

    def failed(self, reason: str) -> None:
        """A read or a write failed."""
        self.failure_count += 1
        self.failing_reason = reason

    def read(self, size_bytes: int) -> None:
        """A read worked."""
        self.read_bytes += size_bytes
        self.failing_reason = ""

    def wrote(self, size_bytes: int) -> None:
        """A write worked."""
        self.written_bytes += size_bytes
        self.failing_reason = ""
