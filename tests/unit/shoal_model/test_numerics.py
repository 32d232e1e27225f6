"""Identities of cached bytes and of computed tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shoal_kernels.precision import EXACT, KV, SERVED, SERVED_BF16
from shoal_model.checkpoint import Checkpoint
from shoal_model.numerics import DEVICE_KERNEL_SET, DEVICE_KERNEL_VERSION, describe_numerics, kernel_set
from shoal_model.revision import WeightsRevision, weights_revision
from support.tiny_model import REPLAY, TINY, tiny_model


def revision() -> WeightsRevision:
    return weights_revision(Checkpoint.open(TINY))


def test_equal_models_have_equal_identities() -> None:
    first = describe_numerics(tiny_model(), revision(), replay_length=REPLAY)
    second = describe_numerics(tiny_model(num_blocks=3, num_slots=1), revision(), replay_length=REPLAY)
    assert first == second
    assert first.is_invariant
    assert first.draft_id == revision().draft


def test_the_replay_length_changes_tokens_but_no_cached_byte() -> None:
    short = describe_numerics(tiny_model(), revision(), replay_length=REPLAY)
    long = describe_numerics(tiny_model(), revision(), replay_length=REPLAY + 4)
    assert short.kv_id == long.kv_id
    assert short.numerics_id != long.numerics_id


def test_other_weights_or_another_precision_are_another_cache() -> None:
    known = describe_numerics(tiny_model(), revision(), replay_length=REPLAY)
    other = describe_numerics(tiny_model(), replace(revision(), weights="other"), replay_length=REPLAY)
    kv = describe_numerics(tiny_model(KV), revision(), replay_length=REPLAY)
    assert len({known.kv_id, other.kv_id, kv.kv_id}) == 3


def test_the_precision_of_accelerators_stores_the_same_bytes_and_computes_others() -> None:
    model, there = tiny_model(), tiny_model()
    there.precision = SERVED_BF16
    host = describe_numerics(model, revision(), replay_length=REPLAY)
    device = describe_numerics(there, revision(), replay_length=REPLAY)
    assert device.kv_id == host.kv_id
    assert device.numerics_id != host.numerics_id
    assert device.is_invariant


def test_the_kernels_of_an_accelerator_are_named_by_what_serves_each_operation() -> None:
    name, version, serving = kernel_set("cpu", SERVED_BF16)
    assert (name, version) == (DEVICE_KERNEL_SET, DEVICE_KERNEL_VERSION)
    assert isinstance(serving, list)
    assert ["linear", "triton"] in serving
    assert kernel_set("cpu", SERVED) == kernel_set("cpu", EXACT)


def test_float64_promises_no_bits() -> None:
    assert not describe_numerics(tiny_model(EXACT), revision(), replay_length=REPLAY).is_invariant


def test_another_draft_head_changes_neither() -> None:
    known = describe_numerics(tiny_model(), revision(), replay_length=REPLAY)
    other = describe_numerics(tiny_model(), replace(revision(), draft="other"), replay_length=REPLAY)
    assert (other.kv_id, other.numerics_id) == (known.kv_id, known.numerics_id)
    assert other.draft_id == "other"


def test_a_replay_that_leaves_gaps_in_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window \\+ backtrack = 22"):
        describe_numerics(tiny_model(), revision(), replay_length=21)


def test_the_replay_of_the_tiny_model_defaults_to_window_and_twice_the_backtrack() -> None:
    assert tiny_model().default_replay_length == 28
