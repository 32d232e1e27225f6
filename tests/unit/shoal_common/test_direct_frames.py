"""Frames of direct connections: what is packed is read, in whatever pieces it comes; damage is read or refused."""

from __future__ import annotations

import math
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.rpc.direct.frames import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_BYTES,
    VERSION,
    DirectBroken,
    Ending,
    FrameKind,
    FrameReader,
    MessageTooLarge,
    Opening,
    pack_credit,
    pack_frame,
    pack_hello,
    unpack_credit,
    unpack_hello,
)

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=8)


def reader() -> FrameReader:
    """One that knows its peer."""
    made = FrameReader()
    made.open_up()
    return made


def test_frames_split_at_every_byte_are_the_frames_of_the_whole() -> None:
    frames = [
        (FrameKind.MESSAGE, 7, b""),
        (FrameKind.END, 2**32 - 1, b"abc"),
        (FrameKind.PING, 0, b""),
        (3, 1, b"x" * 20),
    ]
    whole = b"".join(pack_frame(FrameKind(kind), call_id, payload) for kind, call_id, payload in frames)
    for at in range(len(whole) + 1):
        for then in range(at, len(whole) + 1):
            read = reader()
            parts = (whole[:at], whole[at:then], whole[then:])
            assert [frame for part in parts for frame in read.feed(part)] == frames
    one_by_one = reader()
    assert [frame for byte in whole for frame in one_by_one.feed(bytes([byte]))] == frames


@given(FRAMES, st.lists(st.integers(1, 50), min_size=1))
def test_frames_come_out_as_they_went_in(frames: list[tuple[FrameKind, int, bytes]], sizes: list[int]) -> None:
    whole, read = b"".join(pack_frame(*frame) for frame in frames), reader()
    out: list[tuple[int, int, bytes]] = []
    turn = 0
    while whole:
        size = sizes[turn % len(sizes)]
        out += read.feed(whole[:size])
        whole, turn = whole[size:], turn + 1
    assert out == frames


@pytest.mark.parametrize("limit", [MAX_MESSAGE_BYTES, 18])
def test_a_reader_takes_no_frame_over_its_limit_and_a_strangers_only_greets(limit: int) -> None:
    read = reader() if limit == MAX_MESSAGE_BYTES else FrameReader()
    list(read.feed(pack_frame(FrameKind.HELLO, 0, bytes(18))))
    assert list(read.feed(limit.to_bytes(4, "little") + bytes(5))) == []
    with pytest.raises(DirectBroken, match="a frame of"):
        list(FrameReader().feed((19).to_bytes(4, "little") + bytes(5)))
    with pytest.raises(DirectBroken, match="a frame of"):
        list(reader().feed((2 * MAX_MESSAGE_BYTES).to_bytes(4, "little") + bytes(5)))


@given(
    st.builds(
        Opening,
        TEXT,
        st.floats(allow_nan=False, min_value=-1e300),
        st.dictionaries(TEXT, TEXT, max_size=4),
        st.none() | st.binary(max_size=40),
    )
)
def test_an_opening_is_read_as_it_was_packed(opening: Opening) -> None:
    assert Opening.unpack(opening.pack()) == opening


@given(st.builds(Ending, st.integers(0, 16), TEXT, st.binary(max_size=40)))
def test_an_ending_is_read_as_it_was_packed(ending: Ending) -> None:
    assert Ending.unpack(ending.pack()) == ending


def test_what_cannot_travel_is_refused_where_it_is_sent() -> None:
    for metadata in ({"a": "b\0"}, {"a\0": "b"}, {"": "\0"}):
        with pytest.raises(ValueError, match="NUL"):
            Opening("/a/b", 1.0, metadata, None).pack()
    for opening in (Opening("/a/b", 1.0, {"a": "x" * MAX_TEXT_BYTES}, None), Opening("", 1.0, {}, bytes(2**24 + 1))):
        with pytest.raises(MessageTooLarge, match="larger than max"):
            opening.pack()


@pytest.mark.parametrize("ending", [Ending(5, "x" * 20_000), Ending(5, "x" * 10_000, bytes(10_000))])
def test_a_status_that_is_too_long_becomes_one_that_says_so(ending: Ending) -> None:
    told = Ending.unpack(ending.pack())
    assert (told.code, told.details, told.status) == (8, "Sent status larger than max (20000 vs. 16384)", b"")


def test_text_that_is_no_unicode_still_ends_a_call() -> None:
    assert Ending.unpack(Ending(13, "bad \udc80").pack()).details == "bad ?"


def test_deadlines_that_are_none_are_refused() -> None:
    good = Opening("/a/b", 1.0, {}, b"").pack()
    for timeout_s in (math.nan, -math.inf):
        bad = Opening("/a/b", timeout_s, {}, b"").pack()
        with pytest.raises(DirectBroken):
            Opening.unpack(bad)
    assert Opening.unpack(good).timeout_s == 1.0


def test_another_version_is_no_greeting() -> None:
    with pytest.raises(DirectBroken, match="version"):
        unpack_hello((VERSION + 1).to_bytes(2, "little") + bytes(16))
    assert unpack_hello(pack_hello(b"k" * 16)) == b"k" * 16
    assert unpack_credit(pack_credit(2**32 - 1)) == 2**32 - 1


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_damaged_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choices(string.printable, k=30))
    payloads = [
        Opening(text, 1.0, {text: text, "b": ""}, text.encode()).pack(),
        Ending(3, text, text.encode()).pack(),
        pack_hello(bytes(16)),
        pack_credit(7),
    ]
    for _ in range(300):
        whole = bytearray(chance.choice(payloads))
        for _ in range(chance.randrange(1, 4)):
            whole[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        cut = bytes(whole[: chance.randrange(len(whole) + 1)])
        for read in (Opening.unpack, Ending.unpack, unpack_hello, unpack_credit):
            try:
                read(cut)
            except DirectBroken:
                continue
        held = reader()
        try:
            list(held.feed(cut))
        except DirectBroken:
            continue
        assert len(held._rest) <= len(cut)
