"""Keys: where they are read from, and who is found by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from shoal_common.api_keys import digest, hash_of
from shoal_gateway.edge.key_table import read_table
from shoal_gateway.edge.keys import ApiKey, BadKeys, KeyRing, read_pairs, secret_of
from shoal_gateway.edge.limits import Limits

ALICE, BOB = "alice-has-a-long-enough-key", "bob-has-a-long-enough-key-too"


def key(name: str, *secrets: str, **more: Any) -> ApiKey:
    return ApiKey(key_id=name, digests=tuple(digest(one.encode()) for one in secrets), tenant=name, **more)


def test_a_file_says_all_of_a_key() -> None:
    (found,) = read_table(
        f"""
        [keys.alice]
        hash = ["{hash_of(ALICE)}", "{hash_of(BOB)}"]
        tenant = "team"
        priority = -3
        expires = 2027-01-31T00:00:00Z
        max_concurrency = 4
        requests_per_minute = 60
        input_tokens_per_minute = 100_000
        output_tokens_per_minute = 20_000
        cached_input_weight = 0.25
        """
    )
    assert found == ApiKey(
        key_id="alice",
        digests=(digest(ALICE.encode()), digest(BOB.encode())),
        tenant="team",
        priority=-3,
        expires_s=1801353600.0,
        limits=Limits(
            max_concurrency=4,
            requests_per_minute=60,
            input_tokens_per_minute=100_000,
            output_tokens_per_minute=20_000,
            cached_input_weight=0.25,
        ),
    )


def test_a_key_with_nothing_but_its_hash_is_unlimited_and_its_own_tenant() -> None:
    (found,) = read_table(f'[keys.bob]\nhash = "{hash_of(BOB)}"')
    assert found == key("bob", BOB)
    assert found.limits == Limits()


def test_no_keys_at_all_must_be_said() -> None:
    assert read_table("[keys]") == []
    with pytest.raises(BadKeys, match="no table of keys"):
        read_table("")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys", "not valid TOML"),
        ("[key.a]\nhash=1", "key: is unknown"),
        ("[keys.a]", "keys.a.hash: must be a hash"),
        ("[keys.a]\nhash = []", "keys.a.hash: must be a hash"),
        ('[keys.a]\nhash = "sk-shoal-a-key-and-not-its-hash"', "keys.a.hash: must be sha256:"),
        ("[keys.a]\nhash = [3]", "keys.a.hash: must be sha256:"),
        ('[keys.a.b]\nhash = "x"', "keys.a.b: is unknown"),
        ('[keys."a b"]\nhash = "x"', "a name has"),
        ("keys.a = 3", "keys.a: must be a table"),
        ('[keys.a]\nhash = "H"\nrequest_per_minute = 3', "keys.a.request_per_minute: is unknown; known are"),
        ('[keys.a]\nhash = "H"\nmax_concurrency = 0', r"keys.a.max_concurrency: must be an integer in \[1,"),
        ('[keys.a]\nhash = "H"\nmax_concurrency = true', "keys.a.max_concurrency: must be an integer"),
        ('[keys.a]\nhash = "H"\nrequests_per_minute = 1.5', "keys.a.requests_per_minute: must be an integer"),
        ('[keys.a]\nhash = "H"\ncached_input_weight = 1.5', "keys.a.cached_input_weight: must be a number"),
        ('[keys.a]\nhash = "H"\ncached_input_weight = nan', "keys.a.cached_input_weight: must be a number"),
        ('[keys.a]\nhash = "H"\ntenant = ""', "keys.a.tenant: must be a string"),
        ('[keys.a]\nhash = "H"\npriority = 9999999', "keys.a.priority: must be an integer"),
        ('[keys.a]\nhash = "H"\nexpires = 2027-01-31T00:00:00', "keys.a.expires: must be a date and time"),
        ('[keys.a]\nhash = "H"\nexpires = "tomorrow"', "keys.a.expires: must be a date and time"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_the_field_and_no_secret_is_repeated(text: str, said: str) -> None:
    with pytest.raises(BadKeys, match=said) as refused:
        read_table(text.replace('"H"', f'"{hash_of(ALICE)}"'))
    assert "sk-shoal" not in str(refused.value)
    assert hash_of(ALICE) not in str(refused.value)


def test_keys_of_the_environment_are_pairs() -> None:
    assert read_pairs([f"alice={hash_of(ALICE)}"]) == [key("alice", ALICE)]
    for bad in (hash_of(ALICE), "alice=" + ALICE, "a b=" + hash_of(ALICE), ""):
        with pytest.raises(BadKeys) as refused:
            read_pairs([bad])
        assert ALICE not in str(refused.value)


def test_only_the_whole_secret_opens() -> None:
    ring = KeyRing([key("alice", ALICE), key("bob", BOB, BOB + "-new")], blind=b"b")
    found = ring.find(ALICE.encode(), 0.0)
    assert found is not None
    assert found.key_id == "alice"
    for secret in (BOB, BOB + "-new"):
        other = ring.find(secret.encode(), 0.0)
        assert other is not None
        assert other.key_id == "bob"
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), hash_of(ALICE), "x" * 100_000):
        assert ring.find(wrong.encode(), 0.0) is None


def test_a_key_ends_at_its_time() -> None:
    ring = KeyRing([key("alice", ALICE, expires_s=100.0)], blind=b"b")
    assert ring.find(ALICE.encode(), 99.9) is not None
    assert ring.find(ALICE.encode(), 100.0) is None


def test_two_keys_of_one_secret_or_one_name_are_refused() -> None:
    with pytest.raises(BadKeys, match=r"keys.bob.hash: keys.alice has the same"):
        KeyRing([key("alice", ALICE), key("bob", BOB, ALICE)], blind=b"b")
    with pytest.raises(BadKeys, match="two keys of this name"):
        KeyRing([key("alice", ALICE), dataclasses.replace(key("alice", BOB))], blind=b"b")


@pytest.mark.parametrize(
    ("authorization", "api_key", "secret"),
    [
        ("Bearer abc", "", b"abc"),
        ("bearer   abc ", "", b"abc"),
        ("", "abc", b"abc"),
        ("Bearer abc", "xyz", b"abc"),
        ("Basic abc", "xyz", b"xyz"),
        ("Bearer ", "xyz", b"xyz"),
        ("abc", "", b""),
        ("", "", b""),
    ],
)
def test_the_secret_is_the_bearer_token_or_the_api_key(authorization: str, api_key: str, secret: bytes) -> None:
    assert secret_of(authorization, api_key) == secret


def test_neither_a_key_nor_its_hash_is_shown_by_its_value() -> None:
    assert digest(ALICE.encode()).hex() not in repr(key("alice", ALICE))
    assert repr(digest(ALICE.encode())) not in repr(key("alice", ALICE))
