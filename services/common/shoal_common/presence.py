"""Which instances live. Pure: the record, and the table of a reader; time is an argument."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

LAPSE_S = 3.0
"""A reader drops an instance this long after it last saw it; three heartbeats."""
HEARTBEAT_S = 1.0
_FRESH_S = 1.5 * HEARTBEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What an instance says of itself. Empty strings where a role has no such thing."""

    instance_id: str
    role: str
    address: str
    model: str = ""
    kv_id: str = ""
    numerics_id: str = ""
    draft_id: str = ""
    constraint_id: str = ""
    is_draining: bool = False
    revision: str = ""
    admin_address: str = ""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """What it has at most, by name: blocks, slots, context_tokens, ..."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Other facts that readers may know, e.g. zone or host."""

    def to_json(self) -> bytes:
        """As it lies in the bucket."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Presence:
        """Inverse of `to_json`; fields of a newer version are ignored. Raises ValueError for anything else."""
        values = json.loads(raw)
        if not isinstance(values, dict):
            raise ValueError("a presence is a JSON object")
        known = {one.name for one in dataclasses.fields(cls)}
        try:
            made = cls(**{key: value for key, value in values.items() if key in known})
        except TypeError as error:
            raise ValueError(f"incomplete presence: {error}") from error
        texts = (made.instance_id, made.role, made.address, made.model, made.kv_id, made.numerics_id)
        if not all(isinstance(text, str) for text in texts) or not isinstance(made.capacity, dict):
            raise ValueError("a presence has fields of wrong types")
        return made


class PresenceTable:
    """The instances one reader believes to live.

    Invariant: an entry goes only by its own goodbye, or when it was not seen for LAPSE_S of time in which the reader
    was in touch with NATS. A reader that is cut off keeps its last view, however old.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Presence] = {}
        self._seen_at_s: dict[str, float] = {}
        self._in_touch_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def snapshot(self) -> tuple[Presence, ...]:
        """All entries, by instance id."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    def get(self, instance_id: str) -> Presence | None:
        """The entry of one instance."""
        return self._entries.get(instance_id)

    def seen(self, presence: Presence, now_s: float) -> bool:
        """A heartbeat came. True if the instance is new or says something new."""
        before = self._entries.get(presence.instance_id)
        self._entries[presence.instance_id] = presence
        self._seen_at_s[presence.instance_id] = now_s
        return before != presence

    def seen_again(self, instance_id: str, now_s: float) -> bool:
        """A heartbeat came that says what the last one said. False if the instance is not known."""
        is_known = instance_id in self._entries
        if is_known:
            self._seen_at_s[instance_id] = now_s
        return is_known

    def is_fresh(self, now_s: float) -> bool:
        """All instances were seen a moment ago, so that nobody's silence has to be judged. False if there are none."""
        return bool(self._seen_at_s) and all(now_s - seen_at_s < _FRESH_S for seen_at_s in self._seen_at_s.values())

    def gone(self, instance_id: str) -> bool:
        """An instance said goodbye. False if it was not known."""
        self._seen_at_s.pop(instance_id, None)
        return self._entries.pop(instance_id, None) is not None

    def cut(self) -> None:
        """The reader has no contact: nothing lapses until it has been in touch again for LAPSE_S."""
        self._in_touch_since_s = None

    def in_touch(self, now_s: float) -> list[str]:
        """The reader has contact, and all that was sent to it has arrived. Returns the instances that lapsed."""
        if self._in_touch_since_s is None:
            self._in_touch_since_s = now_s
        lapsed = [
            key
            for key, seen_at_s in self._seen_at_s.items()
            if now_s - max(seen_at_s, self._in_touch_since_s) > LAPSE_S
        ]
        for key in lapsed:
            self.gone(key)
        return lapsed
