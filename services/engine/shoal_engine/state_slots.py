"""State slots of one engine: one per sequence in generation."""

from __future__ import annotations

from shoal_engine.errors import OutOfSlots


class SlotPool:
    """Slot ids 0 .. slot_count - 1. Invariant: free and held slots partition these ids."""

    def __init__(self, slot_count: int) -> None:
        if slot_count < 1:
            raise ValueError(f"slot_count must be positive, got {slot_count}")
        self.slot_count = slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._held: set[int] = set()
        self._generations = [0] * slot_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` slots. Raises OutOfSlots, then takes nothing."""
        if count > len(self._free):
            raise OutOfSlots(f"{count} slots wanted, {len(self._free)} free", wanted=count, free=len(self._free))
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._generations[slot] += 1
        self._held.update(slots)
        return slots

    def generation(self, slot: int) -> int:
        """How often a slot has been taken: names its present holder among all that it had."""
        return self._generations[slot]

    def release(self, slot: int) -> None:
        """Give a held slot back."""
        assert slot in self._held, f"slot {slot} is not held"
        self._held.remove(slot)
        self._free.append(slot)
