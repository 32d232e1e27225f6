"""What must not change on the wire, and what the generated code promises."""

from __future__ import annotations

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from shoal.common.v1.sampling_pb2 import FinishReason, SamplingParams, Usage
from shoal.common.v1.status_pb2 import RpcErrorInfo, RpcStatus
from shoal.common.v1.tokens_pb2 import TokenIds
from shoal.inference.v1.generation_pb2 import ChoiceDelta, Generation
from shoal.inference.v1.inference_service_pb2 import GenerateStreamResponse


def test_golden_bytes_of_a_request_still_mean_the_same() -> None:
    golden = bytes.fromhex("0a0a73686f616c2d6e616e6f22050a038101052a150900000000000000001000280730204202010248013002")
    asked = Generation.FromString(golden)
    assert asked.model == "shoal-nano"
    assert list(asked.tokens.ids) == [129, 5]
    assert asked.sampling == SamplingParams(
        temperature=0.0, top_k=0, seed=7, max_tokens=32, stop_token_ids=[1, 2], ignore_eos=True
    )
    assert asked.n == 2
    assert asked.SerializeToString(deterministic=True) == golden


def test_golden_bytes_of_a_stream_event_still_mean_the_same() -> None:
    golden = bytes.fromhex("120e0801120268692a060a0495010a07")
    event = GenerateStreamResponse.FromString(golden)
    assert event.delta == ChoiceDelta(choice_index=1, text="hi", tokens=TokenIds(ids=[149, 10, 7]))


def test_token_ids_travel_packed() -> None:
    assert len(TokenIds(ids=[1] * 1000).SerializeToString()) == 1003


def test_zero_and_unset_differ_where_zero_is_not_the_default() -> None:
    for name in ("temperature", "top_p", "seed", "max_tokens", "top_logprobs", "ignore_eos", "repetition_penalty"):
        assert not SamplingParams().HasField(name)
        assert SamplingParams(**{name: 0}).HasField(name)  # type: ignore[arg-type]


def test_a_sampling_number_keeps_its_bits() -> None:
    for value in (0.7, 0.95, 1e-5):
        assert SamplingParams.FromString(SamplingParams(temperature=value).SerializeToString()).temperature == value


def test_the_first_finish_reason_is_unspecified_and_usage_begins_at_zero() -> None:
    assert FinishReason.Name(0) == "FINISH_REASON_UNSPECIFIED"  # type: ignore[arg-type]
    assert Usage().prompt_tokens == 0


def test_our_copy_of_a_status_reads_what_google_rpc_writes() -> None:
    info = error_details_pb2.ErrorInfo(reason="OUT_OF_BLOCKS", domain="shoal", metadata={"free": "1"})
    status = status_pb2.Status(code=8, message="full")
    packed = AnyMessage()
    packed.Pack(info)
    status.details.append(packed)
    ours = RpcStatus.FromString(status.SerializeToString())
    assert (ours.code, ours.message) == (8, "full")
    read = RpcErrorInfo.FromString(ours.details[0].value)
    assert (read.reason, read.domain, dict(read.metadata)) == ("OUT_OF_BLOCKS", "shoal", {"free": "1"})
