from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_common import identity

PROGRAM = """
from shoal_common import identity as i
kv = i.kv_id(weights_revision="w", layout="l", formats="f", tokenizer="t")
n = i.numerics_id(kv_id=kv, kernels="k", accelerator="cpu", parallel="1", replay_mode="bounded", replay_tokens=140,
                  invariant=True)
salt = i.tenant_salt("s", tenant="a", user_id="b")
root = i.root_hash(kv_id=kv, numerics_id=n, tenant_salt=salt)
print(kv, n, i.constraint_id(engine_versions={"x": "1", "a": "2"}, routing={"json": "x", "regex": "a"}),
      i.draft_id(draft_weights_revision="d"), i.tenant_tag("s", tenant="a").hex(),
      [one.hex() for one in i.block_hashes(root, list(range(300)))])
"""


def test_ids_are_equal_in_every_process_whatever_its_hash_seed() -> None:
    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert run("1") == run("2") != ""


def test_a_block_hash_is_sha256_of_parent_ids_and_images() -> None:
    parent, ids, image = bytes(range(32)), list(range(128)), b"i" * 32
    expected = hashlib.sha256(parent + struct.pack("<128I", *ids) + image).digest()
    assert identity.block_hash(parent, ids, [image]) == expected


def test_a_rest_below_a_block_has_no_hash_and_the_chain_extends() -> None:
    root = bytes(32)
    chain = identity.block_hashes(root, list(range(2 * 128 + 127)))
    assert len(chain) == 2
    assert identity.block_hash(chain[0], list(range(128, 256))) == chain[1]
    assert identity.block_hashes(root, list(range(127))) == []


@pytest.mark.parametrize(
    ("parent", "ids"),
    [(bytes(31), [0] * 128), (bytes(32), [0] * 127), (bytes(32), [-1] * 128), (bytes(32), [2**32] * 128)],
)
def test_a_malformed_block_is_refused(parent: bytes, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"bytes|tokens|uint32"):
        identity.block_hash(parent, ids)


@given(st.lists(st.text() | st.binary(), max_size=4), st.lists(st.text() | st.binary(), max_size=4))
def test_no_two_inputs_have_one_encoding(left: list[str | bytes], right: list[str | bytes]) -> None:
    assert (identity.encode(*left) == identity.encode(*right)) == (left == right)


def test_tenants_and_users_have_salts_of_their_own() -> None:
    salts = {
        identity.tenant_salt(secret, tenant=tenant, user_id=user)
        for secret, tenant, user in [("s", "ab", "c"), ("s", "a", "bc"), ("s", "a", "b"), ("t", "a", "b")]
    }
    assert len(salts) == 4


def test_every_field_of_the_numerics_counts() -> None:
    def of(**changes: object) -> str:
        values: dict[str, object] = {
            "kv_id": "k", "kernels": "1", "accelerator": "cpu", "parallel": "1", "replay_mode": "bounded",
            "replay_tokens": 140, "invariant": True,
        }  # fmt: skip
        return identity.numerics_id(**{**values, **changes})  # type: ignore[arg-type]

    variants = [
        of(), of(kv_id="x"), of(kernels="2"), of(accelerator="sm90"), of(parallel="2"), of(replay_mode="full"),
        of(replay_tokens=0), of(invariant=False),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
