"""How a key's limits stand, in the headers that the API's own clients read. Pure."""

from __future__ import annotations

import time

from shoal_gateway.edge.account import Standing, Standings

Headers = list[tuple[bytes, bytes]]


def openai_headers(standings: Standings) -> Headers:
    """x-ratelimit-(limit|remaining|reset)-(requests|tokens|input-tokens|output-tokens); reset as `1m30s`."""
    headers: Headers = []
    for name, standing in _named(standings):
        headers += [
            (f"x-ratelimit-limit-{name}".encode(), str(standing.limit).encode()),
            (f"x-ratelimit-remaining-{name}".encode(), str(standing.remaining).encode()),
            (f"x-ratelimit-reset-{name}".encode(), _span(standing.reset_s).encode()),
        ]
    return headers


def anthropic_headers(standings: Standings, now_s: float) -> Headers:
    """anthropic-ratelimit-(requests|tokens|input-tokens|output-tokens)-(limit|remaining|reset); reset as a time.

    now_s   seconds since 1970
    """
    headers: Headers = []
    for name, standing in _named(standings):
        reset = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s + standing.reset_s + 1))
        headers += [
            (f"anthropic-ratelimit-{name}-limit".encode(), str(standing.limit).encode()),
            (f"anthropic-ratelimit-{name}-remaining".encode(), str(standing.remaining).encode()),
            (f"anthropic-ratelimit-{name}-reset".encode(), reset.encode()),
        ]
    return headers


def _named(standings: Standings) -> list[tuple[str, Standing]]:
    """The limits by name; `tokens` is the one of input and output that is nearer to its end."""
    both = [one for one in (standings.input, standings.output) if one is not None]
    tightest = min(both, key=lambda one: one.remaining / one.limit, default=None)
    named = (
        ("requests", standings.requests),
        ("tokens", tightest),
        ("input-tokens", standings.input),
        ("output-tokens", standings.output),
    )
    return [(name, standing) for name, standing in named if standing is not None]


def _span(seconds: float) -> str:
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
