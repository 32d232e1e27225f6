"""The engine's side of the limit on unacknowledged tokens."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.flow import Flow
from shoal_decode_worker.generation import GenerationStart, SamplingSpec


def start(so_far: int) -> GenerationStart:
    return GenerationStart(
        request_id="r",
        attempt=1,
        gateway_id="",
        numerics_id=None,
        cache_root=None,
        tenant_tag=b"",
        prompt_ids=array("I", [1]),
        sampling=SamplingSpec(seed=1),
        choices=(ChoiceStart(output_ids=(7,) * so_far),),
    )


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=80))
def test_a_choice_never_passes_its_limit_and_always_runs_again(so_far: int, moves: list[tuple[bool, int]]) -> None:
    paused = False

    def set_paused(key: str, choice_index: int, is_paused: bool) -> None:
        nonlocal paused
        assert is_paused != paused
        paused = is_paused

    flow = Flow(set_paused)
    flow.opened("r#1", start(so_far))
    emitted = acknowledged = so_far
    for is_step, amount in moves:
        if is_step and not paused:
            emitted += 1 + amount % 6
            flow.emitted("r#1", 0, emitted)
        elif not is_step:
            acknowledged = min(emitted, acknowledged + amount)
            flow.grant("r#1", 0, acknowledged + 256)
        assert emitted - acknowledged <= 256
    flow.grant("r#1", 0, emitted + 256)
    assert not paused


def test_what_comes_for_a_closed_request_is_ignored() -> None:
    flow = Flow(lambda key, choice_index, is_paused: None)
    flow.opened("r#1", start(0))
    flow.closed("r#1")
    flow.closed("r#1")
    flow.emitted("r#1", 0, 10_000)
    flow.grant("r#1", 0, 10_000)
