"""The decode service as a real process around a model that takes no time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.admin.v1 import admin_service_pb2 as admin
from shoal.admin.v1 import admin_service_pb2_grpc as admin_rpc
from shoal.common.v1 import sampling_pb2
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal.decode.v1 import decode_service_pb2_grpc as rpc
from shoal_common.bus import Bus
from shoal_common.control import send
from shoal_common.errors import MeshError
from shoal_common.rpc import from_rpc_error
from shoal_common.watcher import Watcher
from support.decode_caller import TIMEOUT_S, FramesCall, generate_request
from support.nats_server import NatsServer
from support.service_process import ServiceProcess, service_process
from support.waiting import until

MODULE = "shoal_decode_worker.mock_rank"


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    log = tmp_path_factory.mktemp("rank") / "log"
    with service_process(MODULE, log=log, environment={"SHOAL_MOCK_RANK_BEAT_S": "0.05"}) as started:
        yield started


@pytest.fixture
async def stub(rank: ServiceProcess) -> AsyncIterator[rpc.DecodeServiceAsyncStub]:
    async with grpc.aio.insecure_channel(rank.address) as channel:
        yield rpc.DecodeServiceStub(channel)
        # Whatever a test did, the pools are back at their baseline.
        numbers = (await admin_rpc.AdminServiceStub(channel).GetStatus(admin.GetStatusRequest(), timeout=5)).numbers
        assert (numbers["free_blocks"], numbers["free_slots"], numbers["open_requests"]) == (16384, 256, 0)


def params(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{"temperature": 0, "seed": 7, "ignore_eos": True, **fields})


async def collect(call: Any) -> tuple[dict[int, list[int]], pb.Ended | None]:
    """Tokens per choice and the end of a call without a gateway."""
    tokens: dict[int, list[int]] = {}
    while isinstance(event := await call.read(), pb.GenerateResponse):
        for entry in event.entries.entries:
            held = tokens.setdefault(entry.choice_index, [])
            held += entry.token_ids
        if event.HasField("ended"):
            return tokens, event.ended
    return tokens, None


async def failure_of(call: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(call)
    return from_rpc_error(raised.value)


async def test_a_caller_without_a_gateway_gets_tokens_and_end_on_the_call_itself(stub: Any) -> None:
    call = stub.Generate(generate_request(), timeout=TIMEOUT_S)
    first = await call.read()
    assert first.admitted.seed == 7
    assert first.admitted.numerics_id
    tokens, ended = await collect(call)
    assert len(tokens[0]) == 16
    assert ended is not None
    assert ended.usage.completion_tokens == 16
    assert ended.choices[0].finish_reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_tokens_so_far_continue_with_the_same_next_tokens(stub: Any) -> None:
    whole, _ = await collect(stub.Generate(generate_request(), timeout=TIMEOUT_S))
    state = pb.ChoiceState(output_ids=whole[0][:5])
    rest, ended = await collect(stub.Generate(generate_request(attempt=2, choices=[state]), timeout=TIMEOUT_S))
    assert rest[0] == whole[0][5:]
    assert ended is not None
    assert ended.choices[0].token_count == 16


async def test_two_choices_differ_and_a_finished_one_stays_finished(stub: Any) -> None:
    choices = [pb.ChoiceState(output_ids=[1, 2], is_finished=True), pb.ChoiceState()]
    tokens, ended = await collect(stub.Generate(generate_request(choices=choices), timeout=TIMEOUT_S))
    assert set(tokens) == {1}
    assert ended is not None
    assert [one.token_count for one in ended.choices] == [2, 16]
    both, _ = await collect(
        stub.Generate(generate_request(choices=[pb.ChoiceState(), pb.ChoiceState()]), timeout=TIMEOUT_S)
    )
    assert both[0] != both[1] == tokens[1]


async def test_a_stop_token_ends_the_choice_and_is_its_last_token(stub: Any) -> None:
    whole, _ = await collect(stub.Generate(generate_request(), timeout=TIMEOUT_S))
    request = generate_request(params=params(max_tokens=16, stop_token_ids=[whole[0][6]]))
    tokens, ended = await collect(stub.Generate(request, timeout=TIMEOUT_S))
    assert tokens[0] == whole[0][:7]
    assert ended is not None
    assert ended.choices[0].finish_reason == sampling_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"prompt_ids": []}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
        ({"prompt_ids": [4096]}, "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE"),
        ({"prompt_ids": [1] * 8192}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
        ({"request_id": ""}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"attempt": 0}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"params": params(max_tokens=0)}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"params": params(temperature=float("nan"))}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"params": params(top_p=0)}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"choices": [pb.ChoiceState()] * 9}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"cache_root": b"short"}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"numerics_id": "other"}, "FAILED_PRECONDITION", "NUMERICS_MISMATCH"),
        ({"gateway_id": "never seen"}, "FAILED_PRECONDITION", "FRAMES_NOT_OPEN"),
    ],
)
async def test_bad_input_is_a_typed_error(stub: Any, fields: dict[str, Any], code: str, reason: str) -> None:
    error = await failure_of(stub.Generate(generate_request(**fields), timeout=TIMEOUT_S))
    assert (error.code, error.reason) == (code, reason)


async def test_the_end_comes_only_after_the_last_acknowledgement(stub: Any) -> None:
    frames = await FramesCall(stub).open()
    call = stub.Generate(generate_request(gateway_id="gateway"), timeout=TIMEOUT_S)
    assert (await call.read()).HasField("admitted")
    await until(lambda: len(frames.of()) == 16)
    ending = asyncio.ensure_future(call.read())
    beats = len(frames.beats)
    await until(lambda: len(frames.beats) > beats + 1)
    assert not ending.done()
    frames.acknowledge()
    assert (await ending).ended.usage.completion_tokens == 16
    await frames.close()


async def test_a_choice_pauses_at_256_unacknowledged_tokens_and_goes_on_when_they_are_taken(stub: Any) -> None:
    frames = await FramesCall(stub).open()
    request = generate_request(gateway_id="gateway", params=params(max_tokens=600))
    call = stub.Generate(request, timeout=TIMEOUT_S)
    await until(lambda: len(frames.of()) == 256)
    await until(lambda: frames.beats[-1].runnable_count == 0)
    assert len(frames.of()) == 256
    frames.acknowledge()
    await until(lambda: len(frames.of()) == 512)
    frames.acknowledge()
    await until(lambda: len(frames.of()) == 600)
    frames.acknowledge()
    _, ended = await collect(call)
    assert ended is not None
    await frames.close()


async def test_a_stream_opened_again_continues_from_the_index_wanted(stub: Any) -> None:
    whole, _ = await collect(stub.Generate(generate_request(params=params(max_tokens=300)), timeout=TIMEOUT_S))
    frames = await FramesCall(stub).open()
    request = generate_request(gateway_id="gateway", params=params(max_tokens=300))
    call = stub.Generate(request, timeout=TIMEOUT_S)
    await until(lambda: len(frames.of()) == 256)
    await frames.close()
    again = FramesCall(stub)
    # The gateway lost what came after the first hundred.
    again.tokens[("r", 1, 0)] = frames.of()[:100]
    await again.open([again.next_index("r", 1, 0, 100)])
    await until(lambda: len(again.of()) == 300)
    assert again.of() == whole[0]
    again.acknowledge()
    _, ended = await collect(call)
    assert ended is not None
    await again.close()


async def test_a_newer_stream_of_the_gateway_replaces_the_older(stub: Any) -> None:
    older = await FramesCall(stub).open()
    newer = await FramesCall(stub).open()
    await until(lambda: older.error is not None)
    assert older.error is not None
    assert from_rpc_error(older.error).reason == "REPLACED"
    await newer.close()


async def test_a_newer_attempt_aborts_the_older(stub: Any) -> None:
    frames = await FramesCall(stub).open()
    request = generate_request(gateway_id="gateway", params=params(max_tokens=1000))
    older = stub.Generate(request, timeout=TIMEOUT_S)
    await until(lambda: len(frames.of()) == 256)
    request.attempt = 2
    newer = stub.Generate(request, timeout=TIMEOUT_S)
    error = await failure_of(older)
    assert (error.code, error.reason) == ("ABORTED", "SUPERSEDED")
    assert error.metadata["next_index.0"] == "256"
    await until(lambda: len(frames.of(attempt=2)) == 256)
    refused = await failure_of(stub.Generate(request, timeout=TIMEOUT_S))
    assert refused.reason == "ATTEMPT_NOT_NEWER"
    newer.cancel()
    await frames.close()


async def test_cancelling_frees_blocks_and_slots_and_aborting_twice_is_fine(stub: Any) -> None:
    frames = await FramesCall(stub).open()
    call = stub.Generate(generate_request(gateway_id="gateway", params=params(max_tokens=1000)), timeout=TIMEOUT_S)
    await until(lambda: len(frames.of()) == 256)
    call.cancel()
    call.cancel()
    beats = len(frames.beats)
    await until(lambda: len(frames.beats) > beats + 1)
    await frames.close()


async def test_finish_ends_a_choice_at_its_index_by_message_and_by_call(stub: Any) -> None:
    frames = await FramesCall(stub).open()
    state = [pb.ChoiceState(), pb.ChoiceState()]
    request = generate_request(gateway_id="gateway", params=params(max_tokens=1000), choices=state)
    call = stub.Generate(request, timeout=TIMEOUT_S)
    await until(lambda: len(frames.of()) == 256 and len(frames.of(choice_index=1)) == 256)
    frames.say(pb.FramesRequest(finish=pb.Finish(request_id="r", attempt=1, choice_index=0, end_index=200)))
    twin = pb.FinishRequest(finish=pb.Finish(request_id="r", attempt=1, choice_index=1, end_index=3))
    await stub.Finish(twin, timeout=5)
    _, ended = await collect(call)
    assert ended is not None
    assert [one.token_count for one in ended.choices] == [200, 3]
    assert ended.usage.completion_tokens == 203
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Finish(twin, timeout=5)
    assert from_rpc_error(raised.value).reason == "UNKNOWN_REQUEST"
    await frames.close()


async def test_a_stream_that_does_not_begin_with_hello_is_refused(stub: Any) -> None:
    async def messages() -> AsyncIterator[pb.FramesRequest]:
        yield pb.FramesRequest(beat=pb.GatewayBeat())

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Frames(messages(), timeout=5).read()
    assert from_rpc_error(raised.value).reason == "HELLO_EXPECTED"


async def test_a_silent_gateway_loses_its_requests(tmp_path: Path) -> None:
    environment = {"SHOAL_MOCK_RANK_GATEWAY_EXPIRY_S": "0.3", "SHOAL_MOCK_RANK_BEAT_S": "0.05"}
    with service_process(MODULE, log=tmp_path / "log", environment=environment) as rank:
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub: Any = rpc.DecodeServiceStub(channel)
            frames = await FramesCall(stub).open()
            request = generate_request(gateway_id="gateway", params=params(max_tokens=1000))
            error = await failure_of(stub.Generate(request, timeout=TIMEOUT_S))
            assert (error.code, error.reason) == ("ABORTED", "FRAMES_LOST")
            await until(lambda: frames.error is not None)


async def test_a_worker_out_of_blocks_refuses_and_holds_nothing(tmp_path: Path) -> None:
    with service_process(MODULE, log=tmp_path / "log", environment={"SHOAL_MOCK_RANK_BLOCK_COUNT": "9"}) as rank:
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub: Any = rpc.DecodeServiceStub(channel)
            frames = await FramesCall(stub).open()
            big = generate_request("big", gateway_id="gateway", params=params(max_tokens=1000))
            running = stub.Generate(big, timeout=TIMEOUT_S)
            await until(lambda: len(frames.of("big")) == 256)
            error = await failure_of(stub.Generate(generate_request("small", params=params(max_tokens=200)), timeout=5))
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_BLOCKS")
            huge = generate_request("huge", params=params(max_tokens=2000))
            assert (await failure_of(stub.Generate(huge, timeout=5))).reason == "EXCEEDS_CAPACITY"
            running.cancel()
            await frames.close()


async def test_a_worker_told_to_leave_moves_what_runs_and_exits(tmp_path: Path) -> None:
    environment = {"SHOAL_MOCK_RANK_DRAIN_GRACE_S": "2", "SHOAL_MOCK_RANK_DRAIN_MOVE_S": "1.8"}
    with service_process(MODULE, log=tmp_path / "log", environment=environment) as rank:
        async with grpc.aio.insecure_channel(rank.address) as channel:
            stub: Any = rpc.DecodeServiceStub(channel)
            frames = await FramesCall(stub).open()
            request = generate_request(gateway_id="gateway", params=params(max_tokens=1000))
            running = stub.Generate(request, timeout=TIMEOUT_S)
            await until(lambda: len(frames.of()) == 256)
            rank.popen.send_signal(signal.SIGTERM)
            error = await failure_of(running)
            assert (error.code, error.reason) == ("ABORTED", "MOVED")
            assert error.metadata["next_index.0"] == "256"
        assert await asyncio.to_thread(rank.popen.wait, 10) == 0


async def test_a_drained_worker_refuses_until_it_is_resumed(rank: ServiceProcess, stub: Any) -> None:
    async with grpc.aio.insecure_channel(rank.address) as channel:
        operate: Any = admin_rpc.AdminServiceStub(channel)
        await operate.Drain(admin.DrainRequest(), timeout=5)
        assert (await failure_of(stub.Generate(generate_request(), timeout=5))).reason == "DRAINING"
        assert (await operate.GetStatus(admin.GetStatusRequest(), timeout=5)).is_draining
        await operate.Resume(admin.ResumeRequest(), timeout=5)
        tokens, _ = await collect(stub.Generate(generate_request(), timeout=5))
        assert len(tokens[0]) == 16


async def test_log_level_and_profile_answer_and_refuse(rank: ServiceProcess, stub: Any) -> None:
    async with grpc.aio.insecure_channel(rank.address) as channel:
        operate: Any = admin_rpc.AdminServiceStub(channel)
        await operate.SetLogLevel(admin.SetLogLevelRequest(level="DEBUG"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await operate.SetLogLevel(admin.SetLogLevelRequest(level="LOUD"), timeout=5)
        assert from_rpc_error(raised.value).reason == "UNKNOWN_LEVEL"
        request = admin.ProfileRequest()
        request.duration.FromMilliseconds(50)
        stacks = (await operate.Profile(request, timeout=5)).folded_stacks
        assert "shoal_common.process.run" in stacks
        request.duration.FromSeconds(61)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await operate.Profile(request, timeout=5)
        assert from_rpc_error(raised.value).reason == "BAD_DURATION"


async def test_a_rank_tells_the_mesh_that_it_lives_and_its_load(tmp_path: Path) -> None:
    nats = NatsServer(tmp_path / "nats")
    nats.start()
    bus = Bus(nats.url, name="test")
    try:
        await bus.start()
        watcher = Watcher(bus, mesh="local", has_loads=True)
        await watcher.start()
        with service_process(MODULE, log=tmp_path / "log", environment={"SHOAL_NATS_URL": nats.url}) as rank:
            await until(lambda: len(watcher.of_role("decode_worker")) == 1, what="presence")
            (presence,) = watcher.of_role("decode_worker")
            assert presence.address == rank.address
            assert presence.capacity == {"blocks": 16384, "slots": 256, "max_context": 8192}
            assert presence.kv_id
            assert presence.numerics_id
            await until(lambda: watcher.load(presence.instance_id) is not None, what="load")
            load = watcher.load(presence.instance_id)
            assert load is not None
            assert (load.free_blocks, load.free_slots) == (16384, 256)
            await send(bus, "drain", mesh="local", instance_id=presence.instance_id, timeout_s=5)
            await until(lambda: watcher.of_role("decode_worker")[0].is_draining, what="draining")
            rank.popen.send_signal(signal.SIGTERM)
            await until(lambda: not watcher.of_role("decode_worker"), what="goodbye")
        await watcher.stop()
    finally:
        await bus.close()
        nats.stop()
