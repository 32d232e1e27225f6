"""The Frames stream against a worker that does what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from shoal.decode.v1 import decode_service_pb2 as pb
from shoal_common.errors import MeshError
from shoal_common.rpc import Channels
from shoal_gateway import worker_link
from shoal_gateway.pulse import Pulse
from shoal_gateway.worker_link import WorkerLink, WorkerLost
from support.fake_worker import FakeWorker, serving_worker
from support.waiting import until


class Sink:
    """Remembers."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = list(wanted)
        self.entries: list[pb.Entry] = []
        self.errors: list[MeshError] = []
        self.tokens: list[tuple[int, int, int, list[int], int, tuple[int, int, int]]] = []
        """What came in columns, and whether the next of it is taken over."""
        self.takes_over = False
        self.frames: list[int] = []
        """Entries known at the end of each frame that had some."""

    def on_entry(self, entry: pb.Entry, step: int) -> None:
        self.entries.append(entry)

    def on_tokens(
        self,
        attempt: int,
        choice_index: int,
        output_index: int,
        token_ids: list[int],
        step: int,
        drafts: tuple[int, int, int],
    ) -> bool:
        self.tokens.append((attempt, choice_index, output_index, token_ids, step, drafts))
        return self.takes_over

    def on_frame_end(self) -> None:
        self.frames.append(len(self.entries) + len(self.tokens))

    def on_worker_lost(self, error: MeshError) -> None:
        self.errors.append(error)

    def next_indices(self) -> list[int]:
        return self.wanted


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
async def link(worker: FakeWorker) -> AsyncIterator[WorkerLink]:
    channels = Channels()
    async with serving_worker(worker) as address:
        made = WorkerLink(address=address, gateway_id="g", channels=channels, pulse=Pulse())
        yield made
        await made.close()
        await channels.close()


async def test_hello_comes_first_and_names_the_gateway(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    assert [(hello.gateway_id, len(hello.next_indices)) for hello in worker.hellos] == [("g", 0)]


async def test_entries_reach_the_sink_of_their_attempt_and_no_other(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    mine, older = Sink(0), Sink(0)
    link.attach(("r", 2), mine)
    worker.emit("r", 1, 0, [4])
    worker.emit("x", 2, 0, [4])
    worker.emit("r", 2, 0, [5, 6])
    await until(lambda: bool(mine.entries))
    assert [list(entry.token_ids) for entry in mine.entries] == [[5, 6]]
    assert not older.entries


async def test_the_end_of_a_frame_is_told_once_to_each_whose_entries_it_had(
    link: WorkerLink, worker: FakeWorker
) -> None:
    await link.wait_open(5)
    one, other, idle = Sink(0), Sink(0), Sink(0)
    for name, sink in (("one", one), ("other", other), ("idle", idle)):
        link.attach((name, 1), sink)
    names = ("one", "other", "one", "unknown", "one")
    worker.frame(*(pb.Entry(request_id=name, attempt=1, token_ids=[5]) for name in names))
    worker.emit("one", 1, 3, [6])
    await until(lambda: len(one.frames) == 2)
    assert (one.frames, other.frames, idle.frames) == ([3, 4], [1], [])


async def test_a_sink_that_breaks_does_not_end_the_stream_of_the_others(link: WorkerLink, worker: FakeWorker) -> None:
    class Broken(Sink):
        def on_frame_end(self) -> None:
            raise ValueError("not as it was meant")

    await link.wait_open(5)
    other = Sink(0)
    link.attach(("broken", 1), Broken(0))
    link.attach(("other", 1), other)
    worker.emit("broken", 1, 0, [4])
    await until(lambda: len(worker.hellos) == 2)
    worker.emit("other", 1, 0, [5])
    await until(lambda: other.frames == [1])


async def test_columns_reach_the_choices_of_their_numbers_and_end_once_for_each(
    link: WorkerLink, worker: FakeWorker
) -> None:
    await link.wait_open(5)
    one, other = Sink(0), Sink(0, 0)
    first, second = link.attach(("one", 1), one, 1), link.attach(("other", 3), other, 2)
    assert first != second
    entries = [(first, 7, [5]), (first, 8, [6, 7]), (99, 0, [1]), (second, 0, [8]), (second + 1, 4, [9])]
    worker.columns(*entries, step=6, drafts=[1, 1, 0] * 5)
    await until(lambda: bool(other.frames))
    assert one.tokens == [(1, 0, 7, [5], 6, (1, 1, 0)), (1, 0, 8, [6, 7], 6, (1, 1, 0))]
    assert other.tokens == [(3, 0, 0, [8], 6, (1, 1, 0)), (3, 1, 4, [9], 6, (1, 1, 0))]
    assert (one.frames, other.frames) == ([2], [2])


async def test_columns_without_counts_are_a_token_each_without_drafts(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    sink = Sink(0, 0)
    number = link.attach(("r", 1), sink, 2)
    frame = pb.Frame(step=2, choice_numbers=[number, number + 1], output_indices=[3, 4], token_ids=[7, 8])
    worker.message(pb.FramesResponse(frame=frame))
    await until(lambda: bool(sink.frames))
    assert sink.tokens == [(1, 0, 3, [7], 2, (0, 0, 0)), (1, 1, 4, [8], 2, (0, 0, 0))]


async def test_a_number_is_of_nobody_once_its_attempt_is_over(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    old, new = Sink(0), Sink(0)
    number = link.attach(("r", 1), old, 1)
    link.detach(("r", 1), 1)
    mine = link.attach(("r", 2), new, 1)
    worker.columns((number, 0, [5]), (mine, 0, [6]))
    await until(lambda: bool(new.frames))
    assert (old.tokens, [token_ids for _, _, _, token_ids, _, _ in new.tokens]) == ([], [[6]])


@pytest.mark.parametrize("spoiled", ["output_indices", "token_counts", "token_ids", "draft_counts"])
async def test_columns_of_different_lengths_end_the_stream(link: WorkerLink, worker: FakeWorker, spoiled: str) -> None:
    await link.wait_open(5)
    frame = pb.Frame(
        choice_numbers=[1], output_indices=[0], token_counts=[1], token_ids=[5], draft_counts=[0, 0, 0], step=1
    )
    getattr(frame, spoiled).append(1)
    link.attach(("r", 1), Sink(0), 1)
    worker.message(pb.FramesResponse(frame=frame))
    await until(lambda: len(worker.hellos) == 2)


async def test_what_a_sink_took_over_is_acknowledged_without_its_asking(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    sink = Sink(0, 0)
    number = link.attach(("r", 1), sink, 2)
    worker.columns((number, 0, [5, 6]))
    await until(lambda: len(sink.tokens) == 1)
    sink.takes_over = True
    worker.columns((number + 1, 0, [7, 8, 9]))
    await until(lambda: worker.acknowledged("r", 1) == 3)
    assert worker.acknowledged("r", 0) == 0


async def test_acknowledgements_travel_together_within_their_delay(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    link.attach(("r", 1), Sink(0, 0))
    for index in range(1, 40):
        link.acknowledge(("r", 1), 0, index, is_end=False)
        link.acknowledge(("r", 1), 1, index + 1, is_end=False)
    await until(lambda: worker.acknowledged("r", 1) == 40)
    acks = [one for one in worker.heard if one.HasField("acks")]
    assert len(acks) == 1
    assert worker.acknowledged("r", 0) == 39


async def test_a_broken_stream_comes_back_with_the_indices_wanted_and_the_ends(
    link: WorkerLink, worker: FakeWorker
) -> None:
    await link.wait_open(5)
    sink = Sink(7, 3)
    link.attach(("r", 1), sink)
    link.finish(("r", 1), 1, 2)
    await until(lambda: bool(worker.finishes()))
    worker.break_stream()
    await until(lambda: len(worker.hellos) == 2)
    wanted = [(one.request_id, one.attempt, one.choice_index, one.next_index) for one in worker.hellos[1].next_indices]
    assert wanted == [("r", 1, 0, 7), ("r", 1, 1, 3)]
    await until(lambda: worker.finishes() == [(1, 2), (1, 2)])
    worker.emit("r", 1, 7, [9])
    await until(lambda: bool(sink.entries))
    assert not sink.errors


async def test_a_stream_that_does_not_come_back_loses_the_attempts(
    link: WorkerLink, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "REOPEN_S", 0.2)
    await link.wait_open(5)
    sink = Sink(0)
    link.attach(("r", 1), sink)
    worker.is_silent = True
    worker.break_stream()
    await until(lambda: bool(sink.errors))
    assert sink.errors[0].reason == "BROKEN"


async def test_a_silent_worker_loses_the_attempts_without_progress(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    sink = Sink(0)
    link.attach(("r", 1), sink)
    worker.is_silent = True
    link.check(1e12, was_stalled=True)
    assert not sink.errors, "the gateway itself was asleep"
    link.check(2e12, was_stalled=False)
    assert [error.reason for error in sink.errors] == ["NO_PROGRESS"]


async def test_a_worker_that_was_silent_is_listened_to_again(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    link.check(1e12, was_stalled=True)
    link.check(2e12, was_stalled=False)
    await until(lambda: len(worker.hellos) == 2 and link.is_open)
    sink = Sink(0)
    link.attach(("r", 1), sink)
    worker.emit("r", 1, 0, [5])
    await until(lambda: bool(sink.entries))


async def test_a_worker_that_never_answers_is_unreachable(link: WorkerLink, worker: FakeWorker) -> None:
    worker.is_silent = True
    with pytest.raises(WorkerLost) as caught:
        await link.wait_open(0.3)
    assert caught.value.reason == "UNREACHABLE"


async def test_a_detached_attempt_leaves_nothing_to_send(link: WorkerLink, worker: FakeWorker) -> None:
    await link.wait_open(5)
    link.attach(("r", 1), Sink(0))
    link.acknowledge(("r", 1), 0, 3, is_end=False)
    link.detach(("r", 1), 1)
    link.acknowledge(("r", 1), 0, 4, is_end=True)
    link.attach(("s", 1), Sink(0))
    link.acknowledge(("s", 1), 0, 1, is_end=True)
    await until(lambda: worker.acknowledged("s") == 1)
    assert worker.acknowledged("r") == 0
    assert not link.is_idle


async def test_many_tokens_of_a_choice_are_acknowledged_without_delay(
    link: WorkerLink, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "ACK_DELAY_S", 60.0)
    await link.wait_open(5)
    link.attach(("r", 1), Sink(0))
    link.acknowledge(("r", 1), 0, 1, is_end=False)
    link.acknowledge(("r", 1), 0, worker_link.ACK_TOKENS, is_end=False)
    await until(lambda: worker.acknowledged("r") == worker_link.ACK_TOKENS)


async def test_the_end_of_a_choice_does_not_wait_as_long_as_its_middle(
    link: WorkerLink, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "ACK_DELAY_S", 60.0)
    await link.wait_open(5)
    link.attach(("r", 1), Sink(0))
    link.acknowledge(("r", 1), 0, 1, is_end=False)
    link.acknowledge(("r", 1), 0, 2, is_end=True)
    await until(lambda: worker.acknowledged("r") == 2)
