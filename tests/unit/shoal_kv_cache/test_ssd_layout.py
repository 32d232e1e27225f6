"""The bytes of segment files and the map of their pages, against plain models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_kv_cache.core.entries import Form, Group, Kind
from shoal_kv_cache.tiers.descriptions import GroupForm, Malformed, Record, decode_form, encode_form
from shoal_kv_cache.tiers.ssd.layout import (
    PAGE,
    Body,
    FileHeader,
    decode_batch,
    decode_file_header,
    encode_file_header,
    encode_records,
    encode_tombstones,
    header_pages,
    location_of,
    number_and_page,
    split_records,
)
from shoal_kv_cache.tiers.ssd.page_map import PageMap

HEADER = FileHeader(7, b"i" * 16)
digests = st.binary(min_size=32, max_size=32)
forms = st.builds(
    GroupForm,
    st.builds(Group, st.text(max_size=40), st.text(max_size=40), st.binary(max_size=40)),
    st.builds(
        Form,
        st.integers(1, 1 << 20),
        st.lists(st.integers(0, 1 << 40), max_size=5).map(tuple),
        st.sampled_from(["uint8", "float32"]),
        st.integers(1, 1 << 30),
    ),
)
records = st.builds(
    Record,
    st.sampled_from(Kind),
    st.just(0),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, 1000),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    digests,
    digests,
)


@given(forms)
def test_a_form_is_read_as_it_was_written(form: GroupForm) -> None:
    assert decode_form(b"xy" + encode_form(form), 2) == (form, 2 + len(encode_form(form)))


@given(st.lists(forms, min_size=1, max_size=3), st.lists(records, min_size=1, max_size=60), st.integers(1, 5000))
def test_a_batch_is_read_as_it_was_written(many: list[GroupForm], held: list[Record], page: int) -> None:
    pages = header_pages(sum(len(encode_form(form)) for form in many), len(held))
    first = page + pages
    data = encode_records(HEADER, page, Body.of(many, held), first, first + 2000)
    batch = decode_batch(HEADER, page, data + b"what follows")
    assert list(batch.forms) == many
    assert list(batch.records) == [record._replace(page=first + record.page) for record in held]
    assert pages == -(-len(data) // PAGE)
    assert (batch.page_count, batch.header) == (pages + 2000, data)
    moved = [record._replace(page=first + record.page) for record in held]
    assert split_records(HEADER, page, data) == (pages + 2000, Body.of(many, moved))


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=2000))
def test_tombstones_are_read_as_they_were_written(locations: list[int]) -> None:
    assert list(decode_batch(HEADER, 3, encode_tombstones(HEADER, 3, locations)).tombstones) == locations


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_a_batch_header_with_any_bit_flipped_is_refused(held: list[Record], data: st.DataObject) -> None:
    form = GroupForm(Group("kv", "numerics", b"tag"), Form(128, (2, 3), "uint8", 6))
    encoded = encode_records(HEADER, 9, Body.of([form], held), 10, 15)
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    broken = bytearray(encoded)
    broken[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Malformed):
        decode_batch(HEADER, 9, bytes(broken))


@pytest.mark.parametrize(
    ("header", "page"), [(FileHeader(8, b"i" * 16), 9), (FileHeader(7, b"j" * 16), 9), (HEADER, 10)]
)
def test_a_batch_counts_only_where_it_was_written(header: FileHeader, page: int) -> None:
    with pytest.raises(Malformed):
        decode_batch(header, page, encode_tombstones(HEADER, 9, [1]))


@given(st.integers(1, (1 << 40) - 1), st.binary(min_size=16, max_size=16), st.integers(0, 47))
def test_a_file_header_is_read_as_it_was_written_or_refused(number: int, file_id: bytes, at: int) -> None:
    encoded = encode_file_header(FileHeader(number, file_id))
    assert decode_file_header(encoded) == (number, file_id)
    broken = bytearray(encoded)
    broken[at] ^= 0x10
    with pytest.raises(Malformed):
        decode_file_header(bytes(broken))


@given(st.integers(1, (1 << 40) - 1), st.integers(0, (1 << 24) - 1))
def test_a_location_names_one_page_of_one_file(number: int, page: int) -> None:
    assert number_and_page(location_of(number, page)) == (number, page)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=8), max_size=8),
    st.lists(st.integers(0, 300), max_size=40),
    st.none() | st.integers(0, 300),
)
def test_the_page_map_agrees_with_a_list(
    batches: list[list[tuple[int, int]]], killed: list[int], cut: int | None
) -> None:
    pages, live = PageMap(), dict[int, int]()
    for batch in batches:
        at, payloads = pages.end + 1, []
        for gap, count in batch:
            payloads.append((at + gap, count))
            at += gap + count
        pages.add_payloads(payloads, at + len(batch) % 2)
        live.update(payloads)
    for page in killed:
        assert pages.kill(page) == (live.pop(page, None) is not None)
    if cut is not None:
        pages.cut(cut)
        live = {page: count for page, count in live.items() if page + count <= cut}
    again = PageMap.from_bytes(pages.to_bytes())
    for tried in (pages, again):
        assert [page for page in range(1500) if tried.is_live(page)] == sorted(live)
        assert np.flatnonzero(tried.are_live(np.arange(1500, dtype=np.uint64))).tolist() == sorted(live)
        assert (tried.live_count, tried.live_pages) == (len(live), sum(live.values()))
        assert all(tried.pages_at(page) == count for page, count in live.items())
    revived = PageMap.from_bytes(pages.to_bytes(sorted(killed_and_left(killed, pages))))
    assert revived.live_count == len(live) + len(killed_and_left(killed, pages))


def killed_and_left(killed: list[int], pages: PageMap) -> set[int]:
    """Pages below the end that nothing lives at, as a removal leaves them."""
    return {page for page in killed if page < pages.end and not pages.is_live(page)}


@pytest.mark.parametrize("payloads", [[(2, 3)], [(5, 6)], [(6, 2), (7, 1)]])
def test_payloads_that_overlap_are_refused(payloads: list[tuple[int, int]]) -> None:
    pages = PageMap()
    pages.add_payloads([(1, 2)], 4)
    with pytest.raises(ValueError, match="do not lie"):
        pages.add_payloads(payloads, 10)
    assert (pages.end, pages.live_count) == (4, 1)
