"""The engine's bookkeeping on a model that reads back what the engine stored."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_common.errors import AlreadyExists, Draining, InvalidArgument, Moved, Superseded
from shoal_engine.admission import Growth
from shoal_engine.errors import (
    BadRows,
    CommandQueueFull,
    ExceedsCapacity,
    HitNotUsable,
    OutOfBlocks,
    OutOfSlots,
    PromptTooLong,
    TokenOutOfRange,
    UnknownRequest,
    WrongPhase,
)
from shoal_engine.events import FinishReason
from shoal_engine.logical_rows import HandoverRows, LogicalRows, PrefixRows, RowKind
from shoal_engine.planner import FixedWidth
from shoal_engine.requests import ChoiceStart, PrefillRequest
from support.engine_driver import RandomWidths, request
from support.toy_driver import LENGTHS, driver, prompt_of, toy
from support.toy_model import EOS, toy_output, toy_seed

SMALL_GROWTH = Growth(admitted_output=256, blocks=2)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [0, 1, 5])
def test_a_prompt_of_any_length_gives_the_model_s_tokens(length: int, width: int) -> None:
    d = driver(planner=FixedWidth(width), chunk=50)
    expected = toy_output(prompt_of(length), 7, 40)
    assert d.generate(request(prompt_of(length), max_tokens=40)) == [expected]
    d.assert_at_baseline()


@pytest.mark.parametrize("width", [0, 1, 5])
def test_the_output_fills_the_context_to_its_last_position(width: int) -> None:
    d = driver(planner=FixedWidth(width), quality=100, model_context=100)
    expected = toy_output(prompt_of(60), 7, 40, frozenset())
    assert d.generate(request(prompt_of(60), max_tokens=40, ignore_eos=True)) == [expected]


@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=8),
    chunk=st.sampled_from([1, 7, 128, 512]),
    rows=st.sampled_from([8, 64, 512]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_requests_side_by_side_do_not_touch_each_other(lengths: list[int], chunk: int, rows: int, seed: int) -> None:
    d = driver(planner=RandomWidths(seed), chunk=chunk, rows=rows)
    prompts = [prompt_of(length, i) for i, length in enumerate(lengths)]
    requests = [request(p, name=f"r{i}", seed=seed + i, max_tokens=30) for i, p in enumerate(prompts)]
    assert d.generate(*requests) == [toy_output(p, seed + i, 30) for i, p in enumerate(prompts)]
    d.assert_at_baseline()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_choices_share_one_prefill_and_have_their_own_seeds(length: int) -> None:
    d = driver(chunk=64)
    prompt = prompt_of(length)
    d.submit(request(prompt, max_tokens=150, ignore_eos=True, choices=[ChoiceStart()] * 3))
    assert d.core.stats().free_blocks == 64 - (length // 128 + 3 * (-(-(length + 149) // 128) - length // 128))
    d.run()
    for choice in range(3):
        assert d.sink.tokens["r", choice] == toy_output(prompt, toy_seed(7, choice), 150, frozenset())
    assert toy(d).forward_rows[0] <= 64
    d.assert_at_baseline()


def test_sampling_at_the_end_token_stops_inside_accepted_drafts() -> None:
    prompt = prompt_of(40)
    seed = next(s for s in range(500) if 6 < len(toy_output(prompt, s, 60)) < 60)
    expected = toy_output(prompt, seed, 60)
    d = driver(quality=100)
    assert d.generate(request(prompt, seed=seed, max_tokens=60)) == [expected]
    ends, usage = d.sink.ended["r"]
    assert (ends[0].finish_reason, ends[0].token_count) == (FinishReason.STOP, len(expected))
    assert expected[-1] == EOS
    assert usage.output_tokens == len(expected)
    assert usage.accepted_draft_tokens <= usage.draft_tokens


def test_min_tokens_bans_stops_before_it() -> None:
    prompt = prompt_of(40)
    seed = next(s for s in range(500) if len(toy_output(prompt, s, 60)) < 20)
    d = driver(quality=100)
    (tokens,) = d.generate(request(prompt, seed=seed, min_tokens=30, max_tokens=60))
    assert len(tokens) > 30
    assert EOS not in tokens[:30]


def test_max_tokens_and_context_end_give_length() -> None:
    d = driver(max_context=50)
    d.generate(
        request(prompt_of(45), name="context", ignore_eos=True),
        request(prompt_of(9), name="max", max_tokens=3, ignore_eos=True),
    )
    assert d.sink.ended["context"][0][0].token_count == 5
    assert d.sink.ended["max"][0][0].token_count == 3
    assert {d.sink.ended[name][0][0].finish_reason for name in ("context", "max")} == {FinishReason.LENGTH}


def test_log_probabilities_come_with_their_tokens() -> None:
    d = driver()
    (tokens,) = d.generate(request(prompt_of(20), max_tokens=20, top_logprobs=2, ignore_eos=True))
    found = [(p.emitted.token_id, p.emitted.logprob) for entry in d.sink.entries for p in entry.logprobs]
    assert found == [(token, -float(i)) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("length", [30, 129, 300])
def test_an_interrupted_answer_goes_on_with_the_same_tokens(length: int) -> None:
    prompt, whole = prompt_of(length), toy_output(prompt_of(length), 7, 200, frozenset())
    for cut in (1, 2, 3, 50, 99, 128, 150, 199):
        d = driver(chunk=60, planner=RandomWidths(cut))
        start = ChoiceStart(output_ids=tuple(whole[:cut]))
        assert d.generate(request(prompt, max_tokens=200, ignore_eos=True, choices=[start])) == [whole]
        d.assert_at_baseline()


def test_a_finished_choice_is_not_run_again_while_the_other_goes_on() -> None:
    prompt = prompt_of(100)
    other = toy_output(prompt, toy_seed(7, 1), 60, frozenset())
    d = driver()
    starts = [ChoiceStart(output_ids=(5, 6), is_finished=True), ChoiceStart(output_ids=tuple(other[:20]))]
    d.submit(request(prompt, max_tokens=60, ignore_eos=True, choices=starts))
    assert d.core.stats().free_slots == 7
    d.run()
    assert d.sink.tokens["r", 0] == [5, 6]
    assert d.sink.tokens["r", 1] == other
    assert [end.token_count for end in d.sink.ended["r"][0]] == [2, 60]


@pytest.mark.parametrize("last", [EOS, 4])
def test_a_choice_interrupted_after_its_last_token_ends_at_once(last: int) -> None:
    d = driver()
    d.submit(request(prompt_of(9), max_tokens=2, choices=[ChoiceStart(output_ids=(4, last))]))
    reason = FinishReason.STOP if last == EOS else FinishReason.LENGTH
    assert d.sink.ended["r"][0][0].finish_reason is reason
    assert [(e.token_ids, e.finish_reason, e.output_index) for e in d.sink.entries] == [((), reason, 2)]
    d.assert_at_baseline()


def test_an_answer_that_had_ended_holds_no_block_of_its_prompt_whatever_is_loaded_for_it() -> None:
    prompt, ended = prompt_of(300), [ChoiceStart(output_ids=(4, 5), is_finished=True), ChoiceStart(output_ids=(4, EOS))]
    d = driver()
    rows = LogicalRows(
        kind=RowKind.BLOCK, position_begin=0, position_end=128, shape=(1024,), dtype="uint8", data=bytes(1024)
    )
    for name in ("begun", "from the cache", "from elsewhere"):
        d.admit(request(prompt, name=name, max_tokens=8, choices=ended))
        assert d.core.stats().free_blocks == 64
    d.core.start("begun")
    d.core.load_prefix("from the cache", PrefixRows(hit_tokens=128, blocks=[bytes(1024)], encoder_window=None))
    d.core.start("from the cache")
    d.core.load_rows("from elsewhere", [rows])
    d.core.load_prompt("from elsewhere", HandoverRows(rows=[rows], hidden_row=b""))
    assert [[end.token_count for end in ends] for ends, _ in d.sink.ended.values()] == [[2, 2]] * 3
    d.assert_at_baseline()


def test_finish_drops_tokens_past_the_index_and_keeps_the_other_choice_running() -> None:
    d = driver()
    d.submit(request(prompt_of(20), max_tokens=40, ignore_eos=True, choices=[ChoiceStart()] * 2))
    d.run(until=lambda: len(d.sink.tokens["r", 0]) >= 10)
    assert d.core.finish("r", 0, 6)
    assert not d.core.finish("r", 0, 6)
    d.run()
    ends, usage = d.sink.ended["r"]
    assert [(e.finish_reason, e.token_count) for e in ends] == [(FinishReason.STOP, 6), (FinishReason.LENGTH, 40)]
    assert usage.output_tokens == 46
    d.assert_at_baseline()


@pytest.mark.parametrize("phase", ["admitted", "prefill", "decode", "paused"])
def test_cancel_in_any_phase_gives_everything_back(phase: str) -> None:
    d = driver(chunk=10)
    d.admit(request(prompt_of(60), max_tokens=40, ignore_eos=True, choices=[ChoiceStart()] * 2))
    if phase != "admitted":
        d.core.start("r")
        d.core.step()
    if phase in ("decode", "paused"):
        d.run(until=lambda: len(d.sink.tokens["r", 1]) > 5)
    if phase == "paused":
        d.core.pause("r", 0)
        d.core.step()
    assert d.core.cancel("r")
    assert not d.core.cancel("r")
    d.assert_at_baseline()
    assert not d.core.step()
    assert not d.sink.ended


def test_cancel_of_a_prefill_gives_everything_back_and_hands_nothing_more_over() -> None:
    d = driver(chunk=40)
    d.submit(PrefillRequest(request_id="p", prompt_ids=np.array(prompt_of(300))))
    d.core.step()
    assert d.core.cancel("p")
    d.assert_at_baseline()
    assert not d.core.step()
    assert not d.sink.prefilled


def test_a_request_that_waits_for_blocks_can_be_finished_or_cancelled() -> None:
    d = driver(block_count=12, slot_count=4, quality=95, growth=SMALL_GROWTH)
    for number in range(2):
        d.submit(
            request(
                prompt_of(10),
                name=f"r{number}",
                max_tokens=800,
                ignore_eos=True,
                arrival=float(number),
                recover_in_place=True,
                choices=[ChoiceStart()],
            )
        )
    d.run(until=lambda: d.core.stats().waiting == 1)
    assert d.core.finish("r1", 0, 5)
    assert d.sink.ended["r1"][0][0].token_count == 5
    assert d.core.stats().waiting == 0
    assert d.core.cancel("r0")
    d.assert_at_baseline()


def test_a_failed_prefill_says_so() -> None:
    d = driver(chunk=40)
    d.submit(PrefillRequest(request_id="p", prompt_ids=np.array(prompt_of(300))))
    toy(d).fail_next_forward = True
    d.run()
    assert d.sink.failed["p"][0].code == "INTERNAL"
    d.assert_at_baseline()


def test_a_paused_choice_keeps_its_place_and_skips_its_rows() -> None:
    d = driver()
    d.submit(request(prompt_of(20), max_tokens=30, ignore_eos=True))
    d.run(until=lambda: len(d.sink.tokens["r", 0]) >= 5)
    d.core.pause("r", 0)
    assert not d.core.step()
    assert d.core.stats().runnable == 0
    d.core.resume("r", 0)
    d.run()
    assert d.sink.tokens["r", 0] == toy_output(prompt_of(20), 7, 30, frozenset())


def test_a_failed_step_fails_its_requests_and_no_other() -> None:
    d = driver()
    d.submit(request(prompt_of(20), name="a", max_tokens=30, ignore_eos=True))
    d.admit(request(prompt_of(20), name="b", max_tokens=30, ignore_eos=True))
    d.run(until=lambda: len(d.sink.tokens["a", 0]) >= 5)
    count = len(d.sink.tokens["a", 0])
    toy(d).fail_next_forward = True
    d.core.step()
    error, indices = d.sink.failed["a"]
    assert (error.code, indices) == ("INTERNAL", (count,))
    d.core.start("b")
    d.run()
    assert d.sink.tokens["b", 0] == toy_output(prompt_of(20), 7, 30, frozenset())
    d.assert_at_baseline()


def test_the_youngest_of_the_lowest_priority_moves_when_growth_fails() -> None:
    d = driver(block_count=12, slot_count=4, growth=SMALL_GROWTH)
    for name, arrival, priority in (("old", 0.0, 0), ("young", 1.0, 0), ("vip", 2.0, 1)):
        d.admit(request(prompt_of(10), name=name, max_tokens=800, ignore_eos=True, arrival=arrival, priority=priority))
        if name == "old":
            # Each holds 3 blocks at first, and 7 in the end.
            continue
        break
    d.core.start("old")
    d.core.start("young")
    d.run()
    error, indices = d.sink.failed["young"]
    assert isinstance(error, Moved)
    assert indices == (len(d.sink.tokens["young", 0]),)
    assert d.sink.tokens["old", 0] == toy_output(prompt_of(10), 7, 800, frozenset())
    d.assert_at_baseline()


def test_a_request_that_recovers_in_place_says_the_same() -> None:
    d = driver(block_count=12, slot_count=4, quality=95, growth=SMALL_GROWTH)
    for name, arrival in (("old", 0.0), ("young", 1.0)):
        d.submit(
            request(prompt_of(10), name=name, max_tokens=800, ignore_eos=True, arrival=arrival, recover_in_place=True)
        )
    d.run(until=lambda: d.core.stats().waiting == 1)
    with pytest.raises(OutOfBlocks):
        d.admit(request(prompt_of(5), name="late", max_tokens=1))
    d.run()
    assert d.sink.tokens["young", 0] == d.sink.tokens["old", 0] == toy_output(prompt_of(10), 7, 800, frozenset())
    d.assert_at_baseline()


def test_admission_names_what_is_missing_and_holds_nothing() -> None:
    d = driver(block_count=4, slot_count=2, max_context=1000)
    with pytest.raises(PromptTooLong):
        d.admit(request(prompt_of(1000)))
    with pytest.raises(TokenOutOfRange):
        d.admit(request([3, 97]))
    with pytest.raises(TokenOutOfRange):
        d.admit(request([3], choices=[ChoiceStart(output_ids=(97,))], max_tokens=5))
    with pytest.raises(TokenOutOfRange):
        d.admit(request([3], stop_token_ids=frozenset({97}), max_tokens=5))
    with pytest.raises(TokenOutOfRange):
        d.admit(request([-1]))
    with pytest.raises(ExceedsCapacity):
        d.admit(request(prompt_of(10), max_tokens=600))
    with pytest.raises(ExceedsCapacity):
        d.admit(request(prompt_of(10), max_tokens=1, choices=[ChoiceStart()] * 3))
    with pytest.raises(InvalidArgument):
        d.admit(request(prompt_of(10), max_tokens=2, choices=[ChoiceStart(output_ids=(4, 4, 4))]))
    d.admit(request(prompt_of(10), name="a", max_tokens=300))
    with pytest.raises(OutOfBlocks):
        d.admit(request(prompt_of(10), name="b", max_tokens=200))
    d.admit(request(prompt_of(10), name="c", max_tokens=10))
    d.core.cancel("a")
    with pytest.raises(OutOfSlots):
        d.admit(request(prompt_of(10), name="d", max_tokens=10, choices=[ChoiceStart()] * 2))
    d.core.cancel("c")
    d.assert_at_baseline()


def test_a_newer_attempt_replaces_an_older_one_and_not_the_other_way() -> None:
    d = driver()
    d.admit(request(prompt_of(10), attempt=2, max_tokens=5))
    with pytest.raises(AlreadyExists):
        d.admit(request(prompt_of(10), attempt=2, max_tokens=5))
    d.submit(request(prompt_of(10), attempt=3, max_tokens=5))
    assert isinstance(d.sink.failed["r"][0], Superseded)
    d.run()
    assert "r" in d.sink.ended


def test_a_draining_engine_takes_nothing_new_and_moves_what_it_is_told_to() -> None:
    d = driver()
    d.submit(request(prompt_of(10), max_tokens=50, ignore_eos=True))
    d.run(until=lambda: len(d.sink.tokens["r", 0]) >= 3)
    d.core.drain()
    with pytest.raises(Draining):
        d.admit(request(prompt_of(10), name="late"))
    d.core.move("r")
    assert isinstance(d.sink.failed["r"][0], Moved)
    d.core.undrain()
    d.submit(request(prompt_of(10), name="later", max_tokens=2))


def test_what_is_not_here_is_named_so() -> None:
    d = driver()
    with pytest.raises(UnknownRequest):
        d.core.start("nobody")
    d.submit(request(prompt_of(10), max_tokens=5))
    with pytest.raises(WrongPhase):
        d.core.start("r")
    with pytest.raises(UnknownRequest):
        d.core.finish("r", 3, 0)
    with pytest.raises(UnknownRequest):
        d.core.pause("r", -1)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_commands_leaves_the_pools_at_their_baseline(data: st.DataObject) -> None:
    d = driver(block_count=12, slot_count=4, chunk=data.draw(st.sampled_from([5, 40])), planner=RandomWidths(1))
    alive: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(
            st.sampled_from(["admit", "start", "step", "step", "cancel", "finish", "pause", "resume", "fail"])
        )
        names = [name for name in alive if name not in d.sink.ended and name not in d.sink.failed]
        if action == "admit":
            length, count = data.draw(st.sampled_from([3, 129, 300])), data.draw(st.integers(1, 2))
            try:
                d.admit(
                    request(
                        prompt_of(length), name=f"r{number}", arrival=float(number), max_tokens=200, ignore_eos=True,
                        choices=[ChoiceStart()] * count, recover_in_place=data.draw(st.booleans()), export_chain=True,
                    )
                )  # fmt: skip
                alive[f"r{number}"] = length
            except (OutOfBlocks, OutOfSlots):
                pass
        elif action == "step":
            d.core.step()
        elif names:
            name = data.draw(st.sampled_from(names))
            if action == "start":
                with contextlib.suppress(WrongPhase):
                    d.core.start(name)
            elif action == "cancel":
                d.core.cancel(name)
                del alive[name]
            elif action == "finish":
                d.core.finish(name, 0, max(0, len(d.sink.tokens[name, 0]) - data.draw(st.integers(0, 3))))
            elif action == "fail":
                toy(d).fail_next_forward = True
            else:
                getattr(d.core, action)(name, 0)
    toy(d).fail_next_forward = False
    for name in [name for name in alive if name not in d.sink.ended and name not in d.sink.failed]:
        d.core.resume(name, 0)
        with contextlib.suppress(WrongPhase):
            d.core.start(name)
    d.run()
    for name, length in alive.items():
        assert name in d.sink.ended or name in d.sink.failed
        tokens = d.sink.tokens[name, 0]
        assert tokens == toy_output(prompt_of(length), 7, len(tokens), frozenset())
    d.assert_at_baseline()


def test_errors_of_the_engine_have_distinct_reasons() -> None:
    kinds = [BadRows, CommandQueueFull, ExceedsCapacity, HitNotUsable, OutOfBlocks, OutOfSlots, PromptTooLong]
    kinds += [TokenOutOfRange, UnknownRequest, WrongPhase]
    assert len({kind("x").reason for kind in kinds}) == len(kinds)
