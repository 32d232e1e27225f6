"""Whatever is sent as frames arrives as it was, in the order of each choice."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_decode_worker.entries import FinishReason, PositionLogprobs, TokenEntry, TokenLogprob
from shoal_decode_worker.frame_messages import frame_messages
from shoal_decode_worker.ledger import ChoiceLedger, RequestLedger

LOGPROB = PositionLogprobs(emitted=TokenLogprob(token_id=3, logprob=-0.5))
Told = tuple[int, list[int], tuple[int, int, int], int | None, bool]


def told(entry: TokenEntry) -> Told:
    """What of an entry has to arrive."""
    drafts = (entry.drafted_count, entry.verified_count, entry.accepted_count)
    return entry.output_index, list(entry.token_ids), drafts, entry.cached_tokens, entry.finish_reason is not None


def arrived(messages: list[pb.FramesResponse]) -> dict[tuple[str, int], list[Told]]:
    """By request and choice, read as the specification of Frame says. Numbers are 10 * the request's name + choice."""
    read: dict[tuple[str, int], list[Told]] = {}
    for message in messages:
        frame = message.frame
        assert frame.step == 7
        for entry in frame.entries:
            drafts = (entry.drafted_count, entry.verified_count, entry.accepted_count)
            cached = entry.cached_tokens if entry.HasField("cached_tokens") else None
            one = (entry.output_index, list(entry.token_ids), drafts, cached, entry.finish_reason != 0)
            read.setdefault((entry.request_id, entry.choice_index), []).append(one)
        token_ids, counts, drafts_left = list(frame.token_ids), list(frame.token_counts), list(frame.draft_counts)
        for number, output_index in zip(frame.choice_numbers, frame.output_indices, strict=True):
            count = counts.pop(0) if frame.token_counts else 1
            step = tuple(drafts_left[:3]) if frame.draft_counts else (0, 0, 0)
            one = (output_index, token_ids[:count], step, None, False)  # type: ignore[assignment]
            read.setdefault((str(number // 10), number % 10), []).append(one)
            del token_ids[:count], drafts_left[:3]
        assert (token_ids, counts, drafts_left) == ([], [], [])
    return read


entries = st.builds(
    TokenEntry,
    choice_index=st.integers(0, 2),
    output_index=st.integers(0, 9),
    token_ids=st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple),
    drafted_count=st.integers(0, 2),
    finish_reason=st.sampled_from([None, None, None, FinishReason.LENGTH]),
    cached_tokens=st.sampled_from([None, None, None, 0, 5]),
)


@given(st.lists(st.tuples(st.booleans(), st.lists(entries, max_size=5)), max_size=4))
def test_every_entry_arrives_once_in_the_order_of_its_choice(requests: list[tuple[bool, list[TokenEntry]]]) -> None:
    taken: list[tuple[RequestLedger, TokenEntry]] = []
    want: dict[tuple[str, int], list[Told]] = {}
    for place, (has_number, said) in enumerate(requests, 1):
        choices = [ChoiceLedger(first_index=0, is_finished=False) for _ in range(3)]
        request = RequestLedger(
            request_id=str(place), attempt=1, gateway_id="g", choices=choices, first_number=10 * place * has_number
        )
        for entry in sorted(said, key=lambda one: one.choice_index):
            taken.append((request, entry))
            want.setdefault((str(place), entry.choice_index), []).append(told(entry))
    assert arrived(frame_messages(7, taken)) == want


def test_tokens_alone_cost_a_few_bytes_each_and_one_message() -> None:
    taken = []
    for place in range(1, 17):
        request = RequestLedger(request_id="r" * 32, attempt=1, gateway_id="g", choices=[], first_number=place)
        taken.append((request, TokenEntry(choice_index=0, output_index=place, token_ids=(300,))))
    (message,) = frame_messages(7, taken)
    assert not message.frame.entries
    assert message.ByteSize() < 16 * 5


def test_entries_are_joined_only_where_nothing_is_lost() -> None:
    one = TokenEntry(choice_index=0, output_index=3, token_ids=(1, 2), cached_tokens=4)
    end = TokenEntry(choice_index=0, output_index=5, token_ids=(3,), finish_reason=FinishReason.STOP)
    joined = one.followed_by(end)
    assert joined == dataclasses.replace(one, token_ids=(1, 2, 3), finish_reason=FinishReason.STOP)
    for other in (
        dataclasses.replace(end, drafted_count=1),
        dataclasses.replace(end, cached_tokens=0),
        dataclasses.replace(end, logprobs=(LOGPROB,)),
        dataclasses.replace(end, prompt_logprobs=(LOGPROB,)),
    ):
        assert one.followed_by(other) is None
