"""Names and values of remote stores, and when a store is left alone."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import ChecksumMismatch
from shoal_kv_cache.core.entries import Group, Key, Kind
from shoal_kv_cache.tiers.remote import RemoteResting, open_remote
from shoal_kv_cache.tiers.remote.circuit import Circuit
from shoal_kv_cache.tiers.remote.names import Name, Pattern, group_parts, part
from shoal_kv_cache.tiers.remote.values import decode, encode_header
from support.ssd_items import items

HASH = bytes(range(32))
groups = st.builds(Group, st.text(max_size=120), st.text(max_size=120), st.binary(max_size=60))


@given(groups, groups)
def test_two_groups_have_two_names(one: Group, two: Group) -> None:
    names = [Name(group, Key(Kind.BLOCK, HASH)).text for group in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    assert all(re.fullmatch(r"shoal:1:[\w%-]*:[\w%-]*:[\w%]*:b-[0-9a-f]{64}", name, re.ASCII) for name in names)
    assert len(",".join(group_parts(one))) < 255


@given(groups, groups, st.booleans(), st.booleans())
def test_a_pattern_matches_what_a_flush_means(held: Group, asked: Group, has_kv: bool, has_tag: bool) -> None:
    pattern = Pattern(asked.kv_id if has_kv else None, asked.tenant_tag if has_tag else None)
    is_meant = (not has_kv or held.kv_id == asked.kv_id) and (not has_tag or held.tenant_tag == asked.tenant_tag)
    kv_part, _, tag = group_parts(held)
    assert pattern.matches(kv_part, tag) == is_meant
    wanted_kv, wanted_tag = pattern.parts
    glob = f"shoal:1:{'*' if wanted_kv is None else wanted_kv}:*:{'*' if wanted_tag is None else wanted_tag}:*"
    assert fnmatch.fnmatchcase(Name(held, Key(Kind.SNAPSHOT, HASH)).text, glob) == is_meant


def test_a_part_of_a_name_cannot_leave_its_place() -> None:
    assert not set("/:*?[]\\,.") & set(part("../*?[a]:b\\,"))


def test_a_value_is_read_as_it_was_written() -> None:
    for entry, payload in items(range(10)):
        found = decode(Name(entry.group, entry.key), encode_header(entry) + payload)
        assert (found.entry, bytes(found.payload)) == (entry, payload)


@given(st.data())
def test_a_value_with_any_bit_flipped_or_cut_anywhere_is_damaged(data: st.DataObject) -> None:
    entry, payload = items([3])[0]
    whole = bytearray(encode_header(entry) + payload)
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(whole) * 8 - 1))
        whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChecksumMismatch):
        decode(Name(entry.group, entry.key), whole)


def test_a_value_under_another_name_is_damaged() -> None:
    (one, payload), (two, _) = items([0, 1])
    value = encode_header(one) + payload
    other = Group("kv-other", one.group.numerics_id, one.group.tenant_tag)
    for name in (
        Name(two.group, two.key),
        Name(other, one.key),
        Name(one.group, Key(Kind.SNAPSHOT, one.key.block_hash)),
    ):
        with pytest.raises(ChecksumMismatch):
            decode(name, value)


def test_a_store_that_fails_is_left_alone_longer_each_time() -> None:
    circuit = Circuit(failures=3, min_rest_s=1, max_rest_s=4)
    for _ in range(3):
        circuit.enter(0)
    for _ in range(7):
        circuit.failed(0)
    now_s = 0.0
    for rest_s in (1, 2, 4, 4):
        with pytest.raises(RemoteResting) as refused:
            circuit.enter(now_s + rest_s - 0.1)
        assert refused.value.retry_after_s == pytest.approx(0.1)
        now_s += rest_s
        circuit.enter(now_s)
        with pytest.raises(RemoteResting):
            circuit.enter(now_s)
        circuit.failed(now_s)
    circuit.enter(now_s + 4)
    circuit.succeeded()
    circuit.enter(now_s + 4)
    circuit.failed(now_s + 4)
    circuit.enter(now_s + 4)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://somewhere",
        "dir:relative",
        "dir://host/folder",
        "dir:///folder?capacity_bytes=none",
        "dir:///folder?unknown=1",
        "redis://host?ttl_s=0",
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be|none of|no options"):
        open_remote(url)
