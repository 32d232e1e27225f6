"""The requests in one engine: who is here, what they hold, and how they leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Generic

from shoal_common.errors import MeshError, Moved

from shoal_engine.admission import choose_victim
from shoal_engine.errors import UnknownRequest, WrongPhase
from shoal_engine.events import EngineSink, FinishReason
from shoal_engine.holdings import Holdings
from shoal_engine.model_port import Hidden
from shoal_engine.prompts import Prompts
from shoal_engine.requests import GenerationRequest
from shoal_engine.sequence import Phase, RequestState, Sequence
from shoal_engine.step_plan import in_order
from shoal_engine.write_back import WriteBack

logger = logging.getLogger(__name__)


def moved() -> Moved:
    """The error of a request that goes on elsewhere."""
    return Moved("the request gave up its blocks and must go on elsewhere")


class Roster(Generic[Hidden]):
    """Invariant: what is not free in the holdings belongs to a request in `states`; one that leaves holds nothing."""

    def __init__(
        self, holdings: Holdings, prompts: Prompts[Hidden], write_back: WriteBack[Hidden], sink: EngineSink
    ) -> None:
        self.states: dict[str, RequestState] = {}
        self._holdings = holdings
        self._prompts = prompts
        self._write_back = write_back
        self._sink = sink

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.states.values())

    def known(self, request_id: str) -> RequestState:
        """The request of this id. Raises UnknownRequest."""
        state = self.states.get(request_id)
        if state is None:
            raise UnknownRequest(f"request {request_id} is not here", request_id=request_id)
        return state

    def choice(self, request_id: str, choice: int) -> tuple[RequestState, Sequence]:
        """One choice of a request. Raises UnknownRequest."""
        state = self.known(request_id)
        if not 0 <= choice < len(state.sequences) or state.is_prefill_only:
            raise UnknownRequest(f"request {request_id} has no choice {choice}", choice=choice)
        return state, state.sequences[choice]

    def admitted(self, request_id: str) -> RequestState | None:
        """The request if rows can be loaded; None if it lost its blocks and will run its prompt here by itself.

        raises   UnknownRequest, WrongPhase
        """
        state = self.known(request_id)
        if state.phase is Phase.WAITING:
            return None
        if state.phase is not Phase.ADMITTED:
            raise WrongPhase(f"request {request_id} runs already", request_id=request_id, phase=state.phase.value)
        return state

    def add(self, state: RequestState) -> None:
        """Let a request in with what it must hold. Raises OutOfBlocks or OutOfSlots, then it is not in."""
        self._holdings.take(state)
        self._prompts.prepare(state)
        self.states[state.request.request_id] = state

    def end_choice(self, state: RequestState, sequence: Sequence, reason: FinishReason) -> None:
        """A normal end of one choice; of the request, when it was the last."""
        if state.phase is Phase.DECODE:
            self._write_back.choice_ended(state, sequence)
        sequence.end(reason)
        # The prompt may still be running in this choice's slot and blocks.
        if sequence is not state.lead:
            self._holdings.give_back_sequence(sequence)
        if not state.live:
            self.end(state)

    def end(self, state: RequestState) -> None:
        """A normal end of a request whose choices have all ended."""
        self.remove(state)
        self._sink.on_ended(state.request.request_id, state.request.attempt, state.ends(), state.usage())

    def fail(self, state: RequestState, error: MeshError) -> None:
        """A request leaves without an end; nothing happens if it has left already."""
        if state.phase is not Phase.GONE:
            self.remove(state)
            self._sink.on_failed(state.request.request_id, state.request.attempt, error, state.next_indices())

    def remove(self, state: RequestState) -> None:
        """A request leaves without a word."""
        self._holdings.give_back(state)
        state.phase, state.lead = Phase.GONE, None
        del self.states[state.request.request_id]

    def cover(self, state: RequestState, sequence: Sequence, positions: int) -> bool:
        """Make a choice's blocks cover `positions`, at the cost of younger requests. False: it gave up its own."""
        while not self._holdings.grow(state, sequence, positions):
            victim = choose_victim(other for other in self if other.phase is not Phase.WAITING)
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def take_back_waiting(self) -> None:
        """Let requests that lost their blocks run again, as far as there is room."""
        for state in in_order(self, Phase.WAITING):
            # Strictly in order: a small request must not overtake a large one for ever.
            if not self._holdings.can_take(state):
                break
            self._holdings.take(state)
            self._prompts.prepare(state)
            if state.is_started:
                self._prompts.start(state)

    def _preempt(self, state: RequestState) -> None:
        logger.info("preempted", extra={"request_id": state.request.request_id, "phase": state.phase.value})
        request = state.request
        if isinstance(request, GenerationRequest) and request.recover_in_place:
            self._holdings.give_back(state)
            state.lead, state.phase = None, Phase.WAITING
        else:
            self.fail(state, moved())
