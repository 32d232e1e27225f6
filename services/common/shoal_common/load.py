"""How busy instances are: reports with sequence numbers, and the reader's table that drops stale ones. Pure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The load of one instance at one moment; zero where a role has no such thing."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    free_slots: int = 0
    total_slots: int = 0
    step_time_us: int = 0
    step_count: int = 0
    verify_width: float = 0.0
    """Mean number of draft positions verified per sequence and step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    waiting_tokens: int = 0
    """Prompt tokens not yet prefilled."""
    in_flight: dict[str, int] = field(default_factory=dict)
    """Scheduler replicas: placements not yet admitted, by instance id of the worker."""


_FIELDS = tuple(one.name for one in dataclasses.fields(LoadReport))


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedLoad:
    """A report with its origin. Sequence numbers of one instance begin at 1 and only grow."""

    role: str
    instance_id: str
    sequence_number: int
    report: LoadReport

    def to_json(self) -> bytes:
        """As it travels."""
        report = {name: getattr(self.report, name) for name in _FIELDS}
        said = {"role": self.role, "instance_id": self.instance_id, "sequence_number": self.sequence_number}
        return json.dumps({**said, "report": report}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> NumberedLoad:
        """Inverse of `to_json`; fields of a newer version are ignored. Raises ValueError for anything else."""
        try:
            values = json.loads(raw)
            report = LoadReport(**{key: value for key, value in values["report"].items() if key in _FIELDS})
            return cls(
                role=str(values["role"]),
                instance_id=str(values["instance_id"]),
                sequence_number=int(values["sequence_number"]),
                report=report,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a load report: {error}") from error


class LoadTable:
    """The newest report of each instance. Invariant: sequence numbers of an instance never go back."""

    def __init__(self) -> None:
        self._newest: dict[str, NumberedLoad] = {}

    def take(self, load: NumberedLoad) -> bool:
        """Keep a report. False if a newer one of its instance is here already."""
        before = self._newest.get(load.instance_id)
        if before is not None and before.sequence_number >= load.sequence_number:
            return False
        self._newest[load.instance_id] = load
        return True

    def get(self, instance_id: str) -> LoadReport | None:
        """The newest report of an instance."""
        found = self._newest.get(instance_id)
        return found.report if found is not None else None

    def forget(self, instance_id: str) -> None:
        """The instance is gone; without this the table would grow with every restart."""
        self._newest.pop(instance_id, None)
