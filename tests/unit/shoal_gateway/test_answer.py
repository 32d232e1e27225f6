"""An answer from Submit to its end, against a worker and a scheduler that do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
from deepseek_recipe import Tokenizer
from opentelemetry import context as otel_context
from opentelemetry import trace
from shoal.common.v1 import sampling_pb2
from shoal.common.v1.tokens_pb2 import PositionLogprobs, TokenLogprob
from shoal.decode.v1 import decode_service_pb2 as decode_pb
from shoal.scheduler.v1 import scheduler_service_pb2 as pb
from shoal_common.errors import DeadlineExceeded, Draining, InvalidArgument, MeshError, Moved, OutOfCapacity
from shoal_common.request_scope import REQUEST_ID_KEY
from shoal_common.rpc import Channels
from shoal_common.rpc.status import trailing_metadata
from shoal_common.telemetry import Metrics
from shoal_gateway.answer import Answer, Answers
from shoal_gateway.attempt import Workers
from shoal_gateway.encode import Prepared
from shoal_gateway.frames_client import FramesClient
from shoal_gateway.http.write_through import WriteThrough
from shoal_gateway.metrics import GatewayMetrics
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.prefix_chains import PrefixChains
from shoal_gateway.refusals import ExactnessLost, NeverFits, NoCapacity, Overloaded
from shoal_gateway.reserve_client import ReserveClient
from shoal_gateway.running import Timeouts
from shoal_gateway.text import plain_recipe
from support.fake_scheduler import FakeScheduler, placed, serving
from support.fake_worker import ADMITTED, ENDED, FakeWorker, Script, serving_worker
from support.waiting import until

STOP = sampling_pb2.FINISH_REASON_STOP
UNFINISHED = sampling_pb2.FINISH_REASON_UNSPECIFIED
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
Events = AsyncIterator[decode_pb.GenerateResponse]


def prepared(
    *, choice_count: int = 1, stop: list[str] | None = None, is_exact: bool = False, cache_points: tuple[int, ...] = ()
) -> Prepared:
    params = sampling_pb2.SamplingParams(seed=1, max_tokens=50)
    output = plain_recipe(stop, frozenset({1})) if stop is not None else None
    return Prepared(
        prompt_ids=[5, 6, 7],
        params=params,
        choice_count=choice_count,
        user_id="",
        output=output,
        is_exact=is_exact,
        cache_points=cache_points,
    )


class Bench:
    """A gateway's middle, a scheduler and workers; `place` decides."""

    def __init__(self, answers: Answers, scheduler: FakeScheduler, workers: list[FakeWorker]) -> None:
        self.answers, self.scheduler, self.workers = answers, scheduler, workers


@contextlib.asynccontextmanager
async def bench(
    tokenizer: Tokenizer,
    *scripts: Script,
    place: Callable[[str, pb.ReserveRequest], pb.ReserveResponse | None] | None = None,
    numerics: str = "nnnn",
    start_s: float = 20.0,
    total_s: float = 60.0,
    max_in_flight: int = 4,
) -> AsyncIterator[Bench]:
    """Attempt k of a request goes to the worker of script k, of numerics[k]; the last one takes what comes after."""
    workers = [FakeWorker(script) for script in scripts]
    channels, metrics = Channels(), GatewayMetrics(Metrics())
    reserve = ReserveClient(gateway_id="g", channels=channels)
    frames = FramesClient(gateway_id="g", channels=channels)
    chains = PrefixChains("secret")
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_worker(worker)) for worker in workers]
        turns: dict[str, int] = {}

        def in_turn(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
            turn = turns[request_id] = min(turns.get(request_id, -1) + 1, len(addresses) - 1)
            return placed(request_id, f"w{turn}", addresses[turn], kv_id="k", numerics_id=numerics[turn])

        scheduler = FakeScheduler(place or in_turn)
        reserve.announced("s", await stack.enter_async_context(serving(scheduler)))
        answers = Answers(
            model_name="",
            tokenizer=tokenizer,
            chains=chains,
            reserve=reserve,
            workers=Workers(gateway_id="g", channels=channels, frames=frames, chains=chains),
            timeouts=Timeouts(start_s=start_s, total_s=total_s),
            metrics=metrics,
            max_in_flight=max_in_flight,
        )
        await until(lambda: reserve.is_connected)
        yield Bench(answers, scheduler, workers)
        answers.fail_all()
        await reserve.close()
        await frames.close()
        await channels.close()


async def read_all(answer: Answer) -> list[ChoiceOutput]:
    outputs = []
    while not answer.is_finished:
        outputs += await answer.read(10)
    return outputs


def ids(outputs: list[ChoiceOutput], choice_index: int = 0) -> list[int]:
    return [one for output in outputs if output.choice_index == choice_index for one in output.token_ids]


async def fail(context: Any, error: MeshError) -> None:
    await context.abort(grpc.StatusCode[error.code], error.message, trailing_metadata(error))


def says(*token_ids: int, finish: Any = LENGTH) -> Script:
    """Admits, emits all at once, and ends when that is acknowledged."""

    async def script(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        begin = len(request.choices[0].output_ids)
        worker.emit(request.request_id, request.attempt, begin, token_ids[begin:], finish=finish)
        await until(lambda: worker.acknowledged(request.request_id) == len(token_ids))
        yield ENDED

    return script


async def stays_silent(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
    """Admits and says nothing more."""
    yield ADMITTED
    await asyncio.Event().wait()


async def test_a_worker_is_told_where_snapshots_are_kept(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, says(8)) as made, await made.answers.open(prepared(cache_points=(1, 3))) as answer:
        await read_all(answer)
        assert [list(one.cache_points) for one in made.workers[0].requests] == [[1, 3]]


async def test_an_answer_is_admitted_read_acknowledged_and_finished(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, says(10, 11, 12)) as made:
        async with await made.answers.open(prepared()) as answer:
            outputs = await read_all(answer)
        assert ids(outputs) == [10, 11, 12]
        assert outputs[-1].finish_reason == LENGTH
        await until(lambda: bool(made.scheduler.told("finished")))
        usage = made.scheduler.told("finished")[0].finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)
        assert [one.admitted.attempt for one in made.scheduler.told("admitted")] == [1]
        assert made.answers.in_flight == 0


@pytest.mark.parametrize("outcome", ["read", "left"])
async def test_what_an_answer_held_goes_with_it_and_waits_for_no_collection(tokenizer: Tokenizer, outcome: str) -> None:
    class Through:
        def __init__(self, answer: Answer) -> None:
            self.answer = answer

        def __call__(self) -> bool:
            return False

        def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
            return False

        def flush(self) -> None:
            pass

    async def one(made: Bench) -> list[weakref.ref[object]]:
        async with await made.answers.open(prepared()) as answer:
            answer.on_news(Through(answer))
            await (read_all(answer) if outcome == "read" else answer.read(10))
            return [weakref.ref(answer), weakref.ref(answer._running), weakref.ref(answer._running.intake)]

    async def says_one(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        worker.emit(request.request_id, request.attempt, 0, (10,), finish=UNFINISHED)
        async for event in stays_silent(worker, request, context):
            yield event

    async with bench(tokenizer, says(10, 11) if outcome == "read" else says_one) as made:
        await one(made)
        await until(lambda: made.answers.in_flight == 0)
        gc.collect()
        gc.disable()
        try:
            held = await one(made)
            await until(lambda: all(ref() is None for ref in held))
        finally:
            gc.enable()


async def test_a_reader_hears_of_an_error_though_the_last_output_was_written_past_it(tokenizer: Tokenizer) -> None:
    class WritesAll:
        def __call__(self) -> bool:
            return True

        def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
            return False

        def flush(self) -> None:
            pass

    async with bench(tokenizer, stays_silent) as made, await made.answers.open(prepared()) as answer:
        answer.on_news(WritesAll())
        await until(lambda: answer.is_admitted)
        reading = asyncio.create_task(answer.read(60))
        await asyncio.sleep(0)
        made.answers.fail_all()
        with pytest.raises(Draining):
            await asyncio.wait_for(reading, 5)


async def test_its_place_in_the_queue_is_known_while_it_waits_there(tokenizer: Tokenizer) -> None:
    def queued(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
        return pb.ReserveResponse(request_id=request_id, queued=pb.Queued(position=7))

    async with bench(tokenizer, says(10), place=queued) as made, await made.answers.open(prepared()) as answer:
        assert answer.queue_position is None
        await until(lambda: answer.queue_position == 7)
    async with bench(tokenizer, says(10)) as made, await made.answers.open(prepared()) as answer:
        await read_all(answer)
        assert answer.queue_position is None


async def test_the_request_carries_the_pair_and_the_root_of_the_placement(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, says(10)) as made:
        async with await made.answers.open(prepared()) as answer:
            await read_all(answer)
        request = made.workers[0].requests[0]
        assert (request.numerics_id, len(request.cache_root), len(request.tenant_tag)) == ("n", 32, 32)
        assert (list(request.prompt_ids), request.gateway_id, request.params.seed) == ([5, 6, 7], "g", 1)


async def test_whose_request_it_is_decides_its_turn_and_its_cache(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, says(10)) as made:
        for tenant, user_id in (("", ""), ("", "ann"), ("team", ""), ("team", "ann"), ("other", "ann")):
            mine = dataclasses.replace(prepared(), tenant=tenant, user_id=user_id, priority=3)
            async with await made.answers.open(mine) as answer:
                await read_all(answer)
        submits = [one.submit for one in made.scheduler.told("submit")]
        requests = made.workers[0].requests
        assert {one.priority for one in submits} == {one.priority for one in requests} == {3}
        names = [one.tenant for one in submits]
        # Without keys it is each user's turn, with keys each tenant's, and within it each user's.
        assert names[0] == ""
        users = [one.user for one in submits]
        assert users == ["", "", "", users[3], users[3]]
        assert users[3]
        assert names[2] == names[3]
        assert len(set(names)) == 4
        assert not any(word in name for name in names + users for word in ("ann", "team", "other"))
        assert len({one.cache_root for one in requests}) == 5
        assert len({one.tenant_tag for one in requests}) == 3


async def test_trace_and_request_id_go_along_to_scheduler_and_worker(tokenizer: Tokenizer) -> None:
    trace_id = 0x1234567890ABCDEF1234567890ABCDEF
    caller = trace.SpanContext(trace_id, 0x1122334455667788, is_remote=True, trace_flags=trace.TraceFlags(1))
    async with bench(tokenizer, says(10)) as made:
        token = otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(caller)))
        async with await made.answers.open(prepared()) as answer:
            await read_all(answer)
        otel_context.detach(token)
        metadata = made.workers[0].metadata[0]
        assert f"{trace_id:032x}" in metadata["traceparent"]
        assert f"{trace_id:032x}" in made.scheduler.told("submit")[0].submit.traceparent
        assert metadata[REQUEST_ID_KEY] == answer.request_id


async def test_entries_may_come_before_the_admission(tokenizer: Tokenizer) -> None:
    async def early(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        worker.emit(request.request_id, 1, 0, [10], finish=STOP)
        await until(lambda: worker.acknowledged(request.request_id) == 1)
        yield ADMITTED
        yield ENDED

    async with bench(tokenizer, early) as made, await made.answers.open(prepared()) as answer:
        assert ids(await read_all(answer)) == [10]


async def test_a_refusal_is_invisible(tokenizer: Tokenizer) -> None:
    async def refuse(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        await fail(context, OutOfCapacity("full", reason="OUT_OF_BLOCKS"))
        yield ADMITTED

    async with bench(tokenizer, refuse, says(10)) as made, await made.answers.open(prepared()) as answer:
        assert ids(await read_all(answer)) == [10]
        refused = made.scheduler.told("refused")[0].refused
        assert (refused.attempt, refused.reason) == (1, "OUT_OF_BLOCKS")


async def test_after_five_refusals_the_client_is_told_to_come_back(tokenizer: Tokenizer) -> None:
    async def refuse(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        await fail(context, OutOfCapacity("full", reason="OUT_OF_SLOTS"))
        yield ADMITTED

    async with bench(tokenizer, refuse) as made:
        with pytest.raises(NoCapacity) as caught:
            async with await made.answers.open(prepared()) as answer:
                await read_all(answer)
        assert caught.value.retry_after_s
        assert len(made.workers[0].requests) == 6
        assert len(made.scheduler.told("refused")) == 5


async def test_the_callers_fault_is_the_callers_at_once(tokenizer: Tokenizer) -> None:
    async def refuse(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        await fail(context, InvalidArgument.at("params.top_k", "is odd"))
        yield ADMITTED

    async with bench(tokenizer, refuse) as made:
        with pytest.raises(InvalidArgument):
            async with await made.answers.open(prepared()) as answer:
                await read_all(answer)
        assert len(made.workers[0].requests) == 1


@pytest.mark.parametrize("how", ["broken", "moved"])
async def test_a_lost_attempt_goes_on_elsewhere_with_the_tokens_so_far(tokenizer: Tokenizer, how: str) -> None:
    async def breaks(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 1, 0, [10, 11])
        await until(lambda: worker.acknowledged(request.request_id) == 2)
        if how == "moved":
            await fail(context, Moved("away"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")

    async with bench(tokenizer, breaks, says(10, 11, 12, 13)) as made:
        async with await made.answers.open(prepared()) as answer:
            outputs = await read_all(answer)
        assert ids(outputs) == [10, 11, 12, 13]
        assert (answer.attempts, answer.outcome, answer.usage().completion_tokens) == (2, "ok", 4)
        lost = made.scheduler.told("lost")[0].lost
        want = pb.LOST_CAUSE_MOVED if how == "moved" else pb.LOST_CAUSE_BROKEN
        assert (lost.attempt, lost.cause, list(lost.output_counts)) == (1, want, [2])
        second = made.workers[1].requests[0]
        assert (second.attempt, list(second.choices[0].output_ids)) == (2, [10, 11])


@pytest.mark.parametrize("is_exact", [True, False])
async def test_an_answer_that_must_be_exact_fails_where_its_numerics_are_gone(
    tokenizer: Tokenizer, is_exact: bool
) -> None:
    async def breaks(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 1, 0, [10, 11])
        await until(lambda: worker.acknowledged(request.request_id) == 2)
        await fail(context, Moved("away"))

    async with bench(tokenizer, breaks, says(10, 11, 12), numerics="ab") as made:
        async with await made.answers.open(prepared(is_exact=is_exact)) as answer:
            if is_exact:
                with pytest.raises(ExactnessLost):
                    await read_all(answer)
            else:
                assert ids(await read_all(answer)) == [10, 11, 12]
            assert answer.is_exact is is_exact
        wanted = {request.determinism for worker in made.workers for request in worker.requests}
        assert wanted == {sampling_pb2.DETERMINISM_EXACT if is_exact else sampling_pb2.DETERMINISM_UNSPECIFIED}
        assert len(made.workers[1].requests) == (0 if is_exact else 1)


async def test_drafts_count_by_position_and_what_is_sent_once_more_counts_once(tokenizer: Tokenizer) -> None:
    async def talks(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        prompt = [PositionLogprobs(emitted=TokenLogprob(token_id=6, logprob=-1.0))]
        for _ in range(2):
            worker.emit(request.request_id, 1, 0, [10], prompt_logprobs=prompt)
            worker.emit(request.request_id, 1, 1, [11, 12, 13], drafted_count=5, verified_count=3, accepted_count=2)
        worker.emit(request.request_id, 1, 4, [14], finish=LENGTH, drafted_count=2, verified_count=2)
        await until(lambda: worker.acknowledged(request.request_id) == 5)
        yield ENDED

    async with bench(tokenizer, talks) as made, await made.answers.open(prepared()) as answer:
        outputs = await read_all(answer)
        usage = answer.usage()
    assert list(usage.drafted_by_position) == [2, 2, 1, 1, 1]
    assert list(usage.verified_by_position) == [2, 2, 1]
    assert list(usage.accepted_by_position) == [1, 1]
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (5, 2)
    assert [one.emitted.token_id for output in outputs for one in output.prompt_logprobs] == [6]


async def test_a_stop_string_ends_the_choice_at_the_worker_and_counts_exactly(tokenizer: Tokenizer) -> None:
    letters = [tokenizer.encode(letter)[0] for letter in "abcdef"]

    async def talks(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 1, 0, letters)
        await until(lambda: bool(worker.finishes()))
        yield ENDED

    async with bench(tokenizer, talks) as made:
        async with await made.answers.open(prepared(stop=["cd"])) as answer:
            outputs = await read_all(answer)
            usage = answer.usage()
        assert ids(outputs) == letters[:4]
        await until(lambda: made.workers[0].finishes() == [(0, 4)])
        assert usage.completion_tokens == 4
        await until(lambda: bool(made.scheduler.told("finished")))


async def test_one_choice_finished_and_the_other_lost_go_on_apart(tokenizer: Tokenizer) -> None:
    async def half(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 1, 0, [10, 11], choice_index=0, finish=STOP)
        worker.emit(request.request_id, 1, 0, [20], choice_index=1)
        await until(lambda: worker.acknowledged(request.request_id, 1) == 1)
        await fail(context, Moved("away"))

    async def rest(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 2, 1, [21], choice_index=1, finish=LENGTH)
        await until(lambda: worker.acknowledged(request.request_id, 1) == 2)
        yield ENDED

    async with bench(tokenizer, half, rest) as made:
        async with await made.answers.open(prepared(choice_count=2)) as answer:
            outputs = await read_all(answer)
        assert (ids(outputs, 0), ids(outputs, 1)) == ([10, 11], [20, 21])
        choices = made.workers[1].requests[0].choices
        assert [(list(one.output_ids), one.is_finished) for one in choices] == [([10, 11], True), ([20], False)]


async def hangs(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
    """Admits, says one token, and waits for ever."""
    yield ADMITTED
    worker.emit(request.request_id, request.attempt, 0, [10])
    await asyncio.Event().wait()


async def test_leaving_cancels_the_call_and_closes_the_books(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, hangs) as made:
        async with await made.answers.open(prepared()) as answer:
            assert ids(await answer.read(10)) == [10]
        assert (answer.is_admitted, answer.outcome, answer.usage().completion_tokens) == (True, "cancelled", 1)
        await until(lambda: bool(made.workers[0].cancelled))
        await until(lambda: bool(made.scheduler.told("cancelled")))
        assert made.scheduler.told("cancelled")[0].cancelled.usage.completion_tokens == 1
        assert made.answers.in_flight == 0


async def test_leaving_a_complete_answer_unread_ends_the_call_regularly(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, says(10, 11)) as made:
        async with await made.answers.open(prepared()) as answer:
            await until(lambda: answer.is_complete)
        await asyncio.wait_for(made.answers.wait_idle(), 5)
        await until(lambda: bool(made.scheduler.told("finished")))
        assert not made.workers[0].cancelled


async def test_what_is_not_read_is_not_acknowledged(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, hangs) as made, await made.answers.open(prepared()) as answer:
        assert ids(await answer.read(10)) == [10]
        assert await answer.read(0.2) == []
        await until(lambda: made.workers[0].acknowledged(answer.request_id) == 1)


async def test_a_batch_that_is_still_being_written_is_not_acknowledged(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, hangs) as made, await made.answers.open(prepared()) as answer:
        assert ids(await answer.read(10)) == [10]
        async with await made.answers.open(prepared()) as other:
            await other.read(10)
            await other.read(0.01)
            await until(lambda: made.workers[0].acknowledged(other.request_id) == 1)
        assert made.workers[0].acknowledged(answer.request_id) == 0


@pytest.mark.parametrize(
    ("reason", "kind"), [("QUEUE_FULL", NoCapacity), ("NO_WORKERS", NoCapacity), ("EXCEEDS_CAPACITY", NeverFits)]
)
async def test_a_denial_ends_the_request(tokenizer: Tokenizer, reason: str, kind: type[MeshError]) -> None:
    def deny(request_id: str, message: pb.ReserveRequest) -> pb.ReserveResponse:
        return pb.ReserveResponse(request_id=request_id, denied=pb.Denied(reason=reason))

    async with bench(tokenizer, place=deny) as made:
        with pytest.raises(kind) as caught:
            async with await made.answers.open(prepared()) as answer:
                await read_all(answer)
        assert caught.value.reason == reason
        assert (answer.is_admitted, answer.outcome) == (False, reason.lower())


async def test_a_request_that_does_not_begin_in_time_is_refused(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, place=lambda *_: None, start_s=0.1) as made:
        with pytest.raises(NoCapacity, match="has not begun"):
            async with await made.answers.open(prepared()) as answer:
                await read_all(answer)
        await until(lambda: bool(made.scheduler.told("cancelled")))


@pytest.mark.parametrize("start_s", [0.1, 20.0])
async def test_an_answer_that_has_begun_ends_when_all_of_its_time_is_over(tokenizer: Tokenizer, start_s: float) -> None:
    async def stalls(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, request.attempt, 0, [10])
        await asyncio.Event().wait()

    async with bench(tokenizer, stalls, start_s=start_s, total_s=0.4) as made:
        with pytest.raises(DeadlineExceeded, match=r"longer than 0\.4 s"):
            async with await made.answers.open(prepared()) as answer:
                await read_all(answer)
        assert answer.usage().completion_tokens == 1


async def test_a_worker_that_ends_without_the_tokens_is_not_believed(tokenizer: Tokenizer) -> None:
    async def lies(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        yield ENDED

    async with bench(tokenizer, lies, says(10)) as made, await made.answers.open(prepared()) as answer:
        assert ids(await read_all(answer)) == [10]


async def test_requests_in_flight_are_bounded(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, hangs, max_in_flight=2) as made:
        held = [await made.answers.open(prepared()) for _ in range(2)]
        with pytest.raises(Overloaded), made.answers.accepting():
            pass
        held[0].close()
        held.append(await made.answers.open(prepared()))
        for one in held:
            one.close()
        await asyncio.wait_for(made.answers.wait_idle(), 5)


async def test_output_goes_past_a_reader_that_waits_until_the_reader_is_needed(tokenizer: Tokenizer) -> None:
    async def one_by_one(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        name = request.request_id
        for index in range(5):
            finish = LENGTH if index == 4 else sampling_pb2.FINISH_REASON_UNSPECIFIED
            worker.emit(name, request.attempt, index, [10 + index], finish=finish)
            await until(lambda index=index: worker.acknowledged(name) > index)  # type: ignore[misc]
        yield ENDED

    async with bench(tokenizer, one_by_one) as made, await made.answers.open(prepared()) as answer:
        through: list[int] = []

        class Through:
            def __call__(self) -> bool:
                through.extend(ids(answer.take()))
                if len(through) in (2, 5):
                    return False
                answer.acknowledge()
                return True

            def tokens(self, choice_index: int, token_ids: list[int]) -> bool:
                return False

            def flush(self) -> None: ...

        answer.on_news(Through())
        # Woken with nothing to read: it was taken. Reading on says that it was delivered.
        assert await answer.read(10) == []
        assert through == [10, 11]
        assert await answer.read(10) == []
        assert through == [10, 11, 12, 13, 14]
        assert answer.is_finished


async def test_what_ends_an_answer_reaches_the_reader_past_which_output_goes(tokenizer: Tokenizer) -> None:
    async def breaks(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, request.attempt, 0, [10])
        await until(lambda: worker.acknowledged(request.request_id) == 1)
        await fail(context, InvalidArgument("not like this"))

    async with bench(tokenizer, breaks) as made, await made.answers.open(prepared()) as answer:
        form = TokensForm()
        through = WriteThrough(form.write_now, answer, form, lambda: None)  # type: ignore[arg-type]
        answer.on_news(through)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="not like this"):
                await through.read(10)
        assert form.written == [b"10"]


@pytest.mark.parametrize("behind", [(), (0,), (1, 2), (0, 1, 2, 3, 4)])
async def test_what_a_client_that_is_behind_could_not_take_is_the_next_that_is_written(
    tokenizer: Tokenizer, behind: tuple[int, ...]
) -> None:
    async def one_by_one(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        for index in range(6):
            finish = LENGTH if index == 5 else sampling_pb2.FINISH_REASON_UNSPECIFIED
            worker.emit(request.request_id, request.attempt, index, [10 + index], finish=finish)
        await until(lambda: worker.acknowledged(request.request_id) == 6)
        yield ENDED

    async with bench(tokenizer, one_by_one) as made, await made.answers.open(prepared()) as answer:
        form = TokensForm(behind)
        through = WriteThrough(form.write_now, answer, form, lambda: None)  # type: ignore[arg-type]
        answer.on_news(through)
        # As the endpoint reads.
        while not answer.is_finished:
            left, outputs = await through.read(10)
            form.written.append(left + form.events(outputs))
        assert b"".join(form.written) == b"101112131415"
        assert form.refused == len([one for one in behind if one < form.asked])


@pytest.mark.parametrize("behind", [(), (0,), (1, 2), tuple(range(9))])
async def test_columns_go_to_the_client_once_each_whatever_repeats_and_whoever_is_behind(
    tokenizer: Tokenizer, behind: tuple[int, ...]
) -> None:
    ids = tokenizer.encode("the way to the harbour is long")

    async def in_columns(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        name, number = request.request_id, request.first_number
        worker.emit(name, 1, 0, ids[:1], cached_tokens=2)
        worker.columns((number, 1, ids[1:2]))
        worker.columns((number, 0, ids[:3]), (number, 2, ids[2:4]))
        worker.columns((number, 3, ids[3:5]), (number, 5, ids[5:-1]), drafts=[1, 1, 1, 2, 2, 1])
        worker.emit(name, 1, len(ids) - 1, ids[-1:], finish=LENGTH)
        await until(lambda: worker.acknowledged(name) == len(ids))
        yield ENDED

    form = TokensForm(behind)
    request = dataclasses.replace(prepared(stop=[]), output=plain_recipe([], frozenset()))
    async with bench(tokenizer, in_columns) as made, await made.answers.open(request) as answer:
        through = WriteThrough(form.write_now, answer, form, lambda: None)  # type: ignore[arg-type]
        answer.on_news(through)
        while not answer.is_finished:
            left, outputs = await through.read(10)
            form.written.append(left + form.events(outputs))
        assert b"".join(form.written).decode() == "the way to the harbour is long"
        usage = answer.usage()
        assert (usage.completion_tokens, usage.cached_prompt_tokens) == (len(ids), 2)
        assert (list(usage.drafted_by_position), list(usage.accepted_by_position)) == ([1, 1], [1])


async def test_what_a_client_that_is_behind_could_not_take_comes_before_an_error(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the way to the harbour is long")

    async def in_columns(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.emit(request.request_id, 1, 0, ids[:1])
        await until(lambda: worker.acknowledged(request.request_id) == 1)
        worker.columns((request.first_number, 1, ids[1:]))
        await asyncio.Event().wait()

    request = dataclasses.replace(prepared(stop=[]), output=plain_recipe([], frozenset()))
    async with bench(tokenizer, in_columns) as made, await made.answers.open(request) as answer:
        form = TokensForm(behind=(1,))

        def write_now(data: bytes) -> bool:
            is_written = form.write_now(data)
            if not is_written:
                # Before the task runs that is to write it.
                asyncio.get_running_loop().call_soon(made.answers.fail_all)
            return is_written

        through = WriteThrough(write_now, answer, form, lambda: None)  # type: ignore[arg-type]
        answer.on_news(through)

        async def read_on() -> None:
            while True:
                left, outputs = await through.read(10)
                form.written.append(left + form.events(outputs))

        with pytest.raises(Draining):
            await read_on()
        assert form.refused == 1
        assert b"".join(form.written).decode() == "the way to the harbour is long"


async def test_columns_with_a_gap_are_no_answer(tokenizer: Tokenizer) -> None:
    async def with_gap(worker: FakeWorker, request: decode_pb.GenerateRequest, context: Any) -> Events:
        yield ADMITTED
        worker.columns((request.first_number, 1, [10]))
        await asyncio.Event().wait()

    async with bench(tokenizer, with_gap, says(10, 11)) as made, await made.answers.open(prepared()) as answer:
        assert ids(await read_all(answer)) == [10, 11]
        assert answer.attempts == 2


class TokensForm:
    """The part of an AnswerForm that streams use: text, or bare token ids where there is none.

    behind   writes at which the client is
    """

    def __init__(self, behind: tuple[int, ...] = ()) -> None:
        self.written: list[bytes] = []
        self.asked = self.refused = 0
        self._behind = behind

    def events(self, outputs: list[ChoiceOutput]) -> bytes:
        chunks = [self.pieces(output.choice_index, output.chunks) for output in outputs]
        return b"".join(chunks) or "".join(map(str, ids(outputs))).encode()

    def pieces(self, choice_index: int, chunks: Sequence[Any]) -> bytes:
        return "".join(json.loads(one.to_json())["choices"][0]["delta"].get("content") or "" for one in chunks).encode()

    def write_now(self, data: bytes) -> bool:
        turn, self.asked = self.asked, self.asked + 1
        if turn in self._behind:
            self.refused += 1
            return False
        self.written.append(data)
        return True
