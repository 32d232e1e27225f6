"""What clients read of their limits."""

from __future__ import annotations

import pytest
from shoal_gateway.edge.account import Standing, Standings
from shoal_gateway.http.limit_headers import anthropic_headers, openai_headers

STANDINGS = Standings(
    requests=Standing(60, 59, 1.0),
    input=Standing(1000, 900, 6.0),
    output=Standing(100, 10, 54.0),
)


def test_openais_headers_are_limit_remaining_and_reset() -> None:
    assert dict(openai_headers(STANDINGS)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"10",
        b"x-ratelimit-reset-tokens": b"54s",
        b"x-ratelimit-limit-input-tokens": b"1000",
        b"x-ratelimit-remaining-input-tokens": b"900",
        b"x-ratelimit-reset-input-tokens": b"6s",
        b"x-ratelimit-limit-output-tokens": b"100",
        b"x-ratelimit-remaining-output-tokens": b"10",
        b"x-ratelimit-reset-output-tokens": b"54s",
    }


def test_a_limit_that_there_is_not_has_no_header() -> None:
    assert len(openai_headers(Standings(Standing(60, 59, 1.0), None, None))) == 3
    assert openai_headers(Standings(None, None, None)) == []


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0ms"), (0.25, "250ms"), (1.0, "1s"), (90.0, "1m30s"), (3600, "60m0s")]
)
def test_a_reset_is_a_span_as_openai_writes_it(seconds: float, shown: str) -> None:
    headers = dict(openai_headers(Standings(Standing(1, 0, seconds), None, None)))
    assert headers[b"x-ratelimit-reset-requests"] == shown.encode()


def test_anthropics_headers_are_named_its_way_and_reset_at_a_time_that_is_not_too_early() -> None:
    headers = dict(anthropic_headers(STANDINGS, 1_800_000_000.5))
    assert headers[b"anthropic-ratelimit-output-tokens-limit"] == b"100"
    assert headers[b"anthropic-ratelimit-tokens-remaining"] == b"10"
    assert headers[b"anthropic-ratelimit-requests-reset"] == b"2027-01-15T08:00:02Z"
