"""Several answers read as one: order, ends, errors, and what they used together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from shoal.common.v1 import sampling_pb2
from shoal_common.errors import MeshError
from shoal_gateway.answer_group import AnswerGroup, add_usages
from shoal_gateway.encode import Prepared
from shoal_gateway.output_reader import ChoiceOutput
from shoal_gateway.refusals import NoCapacity
from shoal_gateway.waiting import Waiting


@dataclass
class Member:
    """Says its outputs one at a time, then ends, by `error` if it has one."""

    request_id: str
    outputs: list[ChoiceOutput] = field(default_factory=list)
    error: MeshError | None = None
    is_admitted: bool = True
    attempts: int = 1
    acknowledged: int = 0
    is_closed: bool = False
    prepared: Prepared = field(
        default_factory=lambda: Prepared(
            prompt_ids=[5, 6], params=sampling_pb2.SamplingParams(), choice_count=2, user_id="", output=None
        )
    )

    @property
    def is_finished(self) -> bool:
        return not self.outputs and self.error is None

    @property
    def has_news(self) -> bool:
        return bool(self.outputs) or self.error is not None

    @property
    def outcome(self) -> str:
        return "ok" if self.error is None else self.error.reason.lower()

    def usage(self) -> sampling_pb2.Usage:
        return sampling_pb2.Usage(prompt_tokens=2, completion_tokens=3, accepted_by_position=[1])

    def acknowledge(self) -> None:
        self.acknowledged += 1

    def take(self) -> list[ChoiceOutput]:
        if self.outputs:
            return [self.outputs.pop(0)]
        assert self.error is not None
        raise self.error

    def close(self) -> None:
        self.is_closed = True


class Silent(Member):
    """Has nothing to say yet."""

    @property
    def is_finished(self) -> bool:
        return False


def says(*token_ids: int) -> list[ChoiceOutput]:
    return [ChoiceOutput(index % 2, token_ids=[one]) for index, one in enumerate(token_ids)]


async def test_choices_are_counted_on_over_the_members() -> None:
    first, second = Member("a", says(10, 11)), Member("b", says(20, 21, 22))
    group = AnswerGroup([first, second], Waiting())
    read = []
    while not group.is_finished:
        read += [(one.choice_index, one.token_ids[0]) for one in await group.read(1)]
    assert read == [(0, 10), (2, 20), (1, 11), (3, 21), (2, 22)]
    assert (first.acknowledged, second.acknowledged) == (3, 3)
    assert (group.request_id, group.outcome) == ("a", "ok")


async def test_an_error_comes_after_what_the_others_said_before_and_ends_all() -> None:
    group = AnswerGroup([Member("a", error=NoCapacity("full")), Member("b", says(20, 21))], Waiting())
    assert [one.choice_index for one in await group.read(1)] == [2]
    assert not group.is_finished
    with pytest.raises(NoCapacity):
        await group.read(1)
    assert group.outcome == "no_capacity"


async def test_a_read_waits_for_whichever_member_has_news_first() -> None:
    changed = Waiting()
    first, second = Silent("a"), Silent("b")
    group = AnswerGroup([first, second], changed)
    assert await group.read(0) == []
    reading = asyncio.create_task(group.read(10))
    await asyncio.sleep(0)
    second.outputs = says(20)
    changed.wake()
    assert [one.choice_index for one in await reading] == [2]


async def test_only_what_workers_took_was_used() -> None:
    members = [Member("a"), Member("b", is_admitted=False), Member("c", attempts=3)]
    group = AnswerGroup(members, Waiting())
    usage = group.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, list(usage.accepted_by_position)) == (4, 6, [2])
    assert (group.is_admitted, group.attempts) == (True, 3)


async def test_leaving_closes_every_member() -> None:
    members = [Member("a", says(10)), Member("b")]
    async with AnswerGroup(members, Waiting()):
        pass
    assert all(one.is_closed for one in members)


def test_usages_add_up_position_by_position() -> None:
    one = sampling_pb2.Usage(prompt_tokens=5, decode_step_count=2, drafted_by_position=[4, 3, 1])
    other = sampling_pb2.Usage(prompt_tokens=7, decode_step_count=1, drafted_by_position=[2], accepted_by_position=[1])
    added = add_usages([one, other])
    assert (added.prompt_tokens, added.decode_step_count) == (12, 3)
    assert (list(added.drafted_by_position), list(added.accepted_by_position)) == ([6, 3, 1], [1])
    assert set(sampling_pb2.Usage.DESCRIPTOR.fields_by_name) == summed_fields()


def summed_fields() -> set[str]:
    """Those that are there after adding: a new one must not be lost."""
    full = sampling_pb2.Usage()
    for one in sampling_pb2.Usage.DESCRIPTOR.fields:
        if one.is_repeated:
            getattr(full, one.name).append(1)
        else:
            setattr(full, one.name, 1)
    return {one.name for one, _ in add_usages([full]).ListFields()}
