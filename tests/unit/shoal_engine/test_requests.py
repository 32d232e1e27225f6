"""Requests refuse what cannot be meant."""

import math
from typing import Any

import numpy as np
import pytest
from shoal_common.errors import InvalidArgument
from shoal_engine.requests import GenerationRequest, PrefillRequest, SamplingSpec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("top_logprobs", 21),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {1.5: 1.0}),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 2.5),
        ("max_tokens", 1.5),
        ("max_tokens", "3"),
        ("top_logprobs", 1.0),
        ("stop_token_ids", frozenset({1.5})),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingSpec(**{field: value})
    assert caught.value.violations[0].field.startswith(field)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidArgument):
        SamplingSpec(max_tokens=3, min_tokens=4)


def test_an_empty_prompt_no_choice_and_a_wrong_seed_are_refused() -> None:
    some, none = np.array([5]), np.array([], dtype=np.int64)
    with pytest.raises(InvalidArgument):
        PrefillRequest(request_id="r", prompt_ids=none)
    with pytest.raises(InvalidArgument):
        GenerationRequest(request_id="r", prompt_ids=none, params=SamplingSpec(), seed=0)
    with pytest.raises(InvalidArgument):
        GenerationRequest(request_id="r", prompt_ids=some, params=SamplingSpec(), seed=0, choices=())
    with pytest.raises(InvalidArgument):
        GenerationRequest(request_id="r", prompt_ids=some, params=SamplingSpec(), seed=2**64)
