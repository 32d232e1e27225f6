"""Blocks and slots of requests: taken at admission, grown, shared by the choices of one prompt, given back."""

from __future__ import annotations

from shoal_engine.admission import Growth, blocks_to_admit, choice_starts
from shoal_engine.block_pool import BlockPool, blocks_for
from shoal_engine.errors import OutOfBlocks
from shoal_engine.sequence import RequestState, Sequence
from shoal_engine.state_slots import SlotPool


class Holdings:
    """The pools of one engine. Invariant: every held block and slot belongs to a sequence of a request."""

    def __init__(self, block_count: int, slot_count: int, growth: Growth) -> None:
        self._growth = growth
        self.blocks = BlockPool(block_count)
        self.slots = SlotPool(slot_count)

    def take(self, state: RequestState) -> None:
        """Blocks and slots for every live choice. Raises OutOfBlocks or OutOfSlots, then takes nothing."""
        live = state.live
        shared, own = blocks_to_admit(state.prompt_length, choice_starts(state), state.rule, self._growth)
        wanted = shared + sum(own)
        if wanted > self.blocks.free_count:
            raise OutOfBlocks(
                f"{wanted} blocks wanted, {self.blocks.free_count} free", wanted=wanted, free=self.blocks.free_count
            )
        slots = self.slots.allocate(len(live))
        common = self.blocks.allocate(shared)
        for i, sequence in enumerate(live):
            if i:
                self.blocks.retain(common)
            sequence.blocks = [*common, *self.blocks.allocate(own[i])]
            sequence.slot, sequence.slot_generation = slots[i], self.slots.generation(slots[i])
        state.lead = live[0] if live else None

    def can_take(self, state: RequestState) -> bool:
        """Whether `take` would succeed."""
        shared, own = blocks_to_admit(state.prompt_length, choice_starts(state), state.rule, self._growth)
        return shared + sum(own) <= self.blocks.free_count and len(own) <= self.slots.free_count

    def grow(self, state: RequestState, sequence: Sequence, positions: int) -> bool:
        """Cover `positions` positions, with blocks ahead where some are free. False: too few are; nothing is taken."""
        missing = blocks_for(positions) - len(sequence.blocks)
        if missing <= 0:
            return True
        free = self.blocks.free_count
        if missing > free:
            return False
        ahead = blocks_for(state.position_limit(sequence)) - len(sequence.blocks)
        sequence.blocks += self.blocks.allocate(min(max(self._growth.blocks, missing), max(ahead, missing), free))
        return True

    def give_back(self, state: RequestState) -> None:
        """Everything the request holds."""
        for sequence in state.sequences:
            self.give_back_sequence(sequence)

    def give_back_sequence(self, sequence: Sequence) -> None:
        """Everything one choice holds; nothing happens when that is nothing."""
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot is not None:
            self.slots.release(sequence.slot)
            sequence.slot = None
