"""The log of flushes: whoever was away hears of what it missed, however short the logs are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from shoal_kv_cache.core.flush_epochs import Filter
from shoal_kv_cache.core.flush_log import FlushLog, FlushRecord
from shoal_kv_cache.flush_file import FlushFile

WHATS = [Filter(), Filter(kv_id="k"), Filter(tenant_tag=b"t"), Filter(kv_id="k", tenant_tag=b"u")]
GROUPS = [("k", b"t"), ("k", b"u"), ("l", b"t"), ("l", b"v")]
NAMES = range(4)


class OneNode:
    """A log, and what of each group is held: the numbers of the puts that brought it."""

    def __init__(self) -> None:
        self.log = FlushLog(max_records=3)
        self.held: dict[tuple[str, bytes], set[int]] = {group: set() for group in GROUPS}
        self.flushed_count = 0

    def do(self, record: FlushRecord) -> None:
        self.log.note(record.flush_id, record.what, is_done=True)
        for group in GROUPS:
            if record.what.matches(*group):
                self.flushed_count += bool(self.held[group])
                self.held[group].clear()


class FlushesWithAbsences(RuleBasedStateMachine):
    """Flushes reach whoever is there; who comes back asks one that is there, and then holds nothing old."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [OneNode() for _ in NAMES]
        self.away: dict[int, int] = {}  # how many flushes each has heard of meanwhile
        self.number = 0
        self.flushed_at: list[tuple[int, Filter]] = []

    @rule(name=st.sampled_from(NAMES), group=st.sampled_from(GROUPS))
    def put(self, name: int, group: tuple[str, bytes]) -> None:
        if name not in self.away:
            self.number += 1
            self.nodes[name].held[group].add(self.number)

    @rule(what=st.sampled_from(WHATS), also=st.none() | st.sampled_from(NAMES))
    def flush(self, what: Filter, also: int | None) -> None:
        """also: hears of it though it is cut off, before it has asked for what it missed."""
        self.number += 1
        self.flushed_at.append((self.number, what))
        for name in NAMES:
            if name == also and self.away.get(name, 9) < 2:
                self.away[name] += 1
            elif name in self.away:
                continue
            self.nodes[name].do(FlushRecord(f"flush {self.number}", what))

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: int) -> None:
        # Somebody stays: what nobody has heard of nobody can tell.
        if len(self.away) < len(NAMES) - 1:
            self.away[name] = 0

    @rule(name=st.sampled_from(NAMES), draw=st.integers(0, 3))
    def come_back(self, name: int, draw: int) -> None:
        if name in self.away:
            there = [other for other in NAMES if other not in self.away]
            other = self.nodes[there[draw % len(there)]]
            for one in self.nodes[name].log.missed(other.log.records, has_forgotten=other.log.has_forgotten):
                self.nodes[name].do(one)
            del self.away[name]

    @invariant()
    def who_is_there_holds_nothing_from_before_a_flush(self) -> None:
        for name in NAMES:
            if name not in self.away:
                for group, numbers in self.nodes[name].held.items():
                    flushed = max((at for at, what in self.flushed_at if what.matches(*group)), default=0)
                    assert all(number > flushed for number in numbers)

    @invariant()
    def logs_are_bounded(self) -> None:
        assert all(len(node.log.records) <= 3 for node in self.nodes)


TestFlushesWithAbsences = FlushesWithAbsences.TestCase
TestFlushesWithAbsences.settings = settings(max_examples=40, stateful_step_count=30)


def test_who_was_there_has_missed_nothing_although_both_have_forgotten_the_oldest() -> None:
    one, other = FlushLog(max_records=3), FlushLog(max_records=4)
    for number in range(9):
        for log in (one, other):
            log.note(str(number), Filter(tenant_tag=b"t"), is_done=True)
    assert one.missed(other.records, has_forgotten=other.has_forgotten) == []
    assert other.missed(one.records, has_forgotten=one.has_forgotten) == []
    assert one.digest() != other.digest()


def test_what_is_not_done_is_never_forgotten_and_still_bounded() -> None:
    log = FlushLog(max_records=3)
    log.note("open", Filter(kv_id="k"), is_done=False)
    for number in range(9):
        log.note(str(number), Filter(kv_id="k"), is_done=True)
    assert [one.flush_id for one in log.unfinished()] == ["open"]
    for number in range(9):
        log.note(f"open {number}", Filter(kv_id="k"), is_done=False)
    assert len(log.records) == 3
    assert any(one.what == Filter() for one in log.unfinished())


def test_one_name_that_means_two_things_means_everything() -> None:
    log = FlushLog()
    log.note("same", Filter(kv_id="k"), is_done=True)
    log.note("same", Filter(kv_id="l"), is_done=False)
    assert [one.what for one in log.unfinished()] == [Filter()]


RECORDS = st.lists(
    st.builds(
        FlushRecord,
        st.text(min_size=1, max_size=64),
        st.builds(
            Filter,
            kv_id=st.none() | st.text(max_size=8),
            tenant_tag=st.none() | st.binary(max_size=4),
        ),
        is_done=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.flush_id,
)


@settings(max_examples=30)
@given(
    records=RECORDS,
    forgotten=st.lists(st.binary(min_size=16, max_size=16), max_size=4, unique=True),
    has_forgotten=st.booleans(),
)
def test_the_file_keeps_the_log(
    tmp_path_factory: object, records: list[FlushRecord], forgotten: list[bytes], has_forgotten: bool
) -> None:
    folder = tmp_path_factory.mktemp("log")  # type: ignore[attr-defined]
    FlushFile(folder).write(records, forgotten=forgotten, has_forgotten=has_forgotten)
    read = FlushFile(folder).read()
    assert (read.records, read.forgotten, read.has_forgotten) == (records, forgotten, has_forgotten)


def test_who_missed_more_than_others_remember_drops_everything_though_it_heard_of_the_newest() -> None:
    one, other = FlushLog(max_records=3), FlushLog(max_records=3)
    one.note("0", Filter(kv_id="k"), is_done=True)
    for number in range(10):
        other.note(str(number), Filter(kv_id="k"), is_done=True)
    one.note("9", Filter(kv_id="k"), is_done=True)
    missed = one.missed(other.records, has_forgotten=other.has_forgotten)
    assert [(record.flush_id, record.what) for record in missed] == [("7", Filter()), ("8", Filter())]


def test_what_was_missed_is_told_from_what_was_forgotten_though_a_new_one_was_heard_of_first() -> None:
    # The other one came when this one was cut off, and knows of two; both heard of the second.
    one, other = FlushLog(max_records=3), FlushLog()
    for number in range(9):
        for log in [one] if number < 7 else [other] if number == 7 else [one, other]:
            log.note(str(number), Filter(kv_id=str(number)), is_done=True)
    missed = one.missed(other.records, has_forgotten=other.has_forgotten)
    assert [(record.flush_id, record.what) for record in missed] == [("7", Filter(kv_id="7"))]
    assert one.missed([FlushRecord("2", Filter()), *other.records[1:]], has_forgotten=False) == []


def test_the_names_of_what_was_forgotten_are_bounded_and_what_is_older_counts_as_missed() -> None:
    log = FlushLog(max_records=2, max_names=3)
    records = [FlushRecord(str(number), Filter(kv_id="k"), is_done=True) for number in range(9)]
    for record in records:
        log.note(record.flush_id, record.what, is_done=True)
    assert len(log.forgotten) == 3
    assert [one.flush_id for one in log.missed(records, has_forgotten=False)] == ["0", "1", "2", "3"]


def test_a_file_that_cannot_be_read_means_that_everything_is_to_be_flushed(tmp_path: Path) -> None:
    assert FlushFile(tmp_path).read().records == []
    FlushFile(tmp_path).write([FlushRecord("a", Filter(kv_id="k"), is_done=True)], forgotten=[], has_forgotten=False)
    whole = (tmp_path / "flushes").read_bytes()
    for damaged in (whole[:-9], b"\x00" + whole, b"[]\n", b"\xff", b"{}\n"):
        (tmp_path / "flushes").write_bytes(damaged)
        assert [one.what for one in FlushFile(tmp_path).read().unfinished()] == [Filter()]
