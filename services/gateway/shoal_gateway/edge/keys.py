"""API keys: what is known of each, and finding the one that a caller shows. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_common.api_keys import KEY_NAME, KEY_NAME_FORM, MAX_KEY_BYTES, digest, read_hash

from shoal_gateway.edge.limits import UNLIMITED, Limits

_NOBODY = bytes(32)


class BadKeys(ValueError):
    """The keys cannot be used. The message names the place and never repeats a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller. Its secret may be any of several, so that a new one can come before the old one goes.

    tenant       whose KV cache it shares, and whose fair share of the queue
    priority     greater goes first
    expires_s    seconds since 1970 from which on it is not valid; None: never
    """

    key_id: str
    digests: tuple[bytes, ...] = field(repr=False)
    tenant: str
    priority: int = 0
    expires_s: float | None = None
    limits: Limits = UNLIMITED


class KeyRing:
    """Finds keys by their secret, in a time that does not depend on what is known.

    blind   random bytes of this process: places in the table cannot be aimed at from outside
    """

    def __init__(self, keys: Iterable[ApiKey], *, blind: bytes) -> None:
        """Raises BadKeys where two keys have one id or one secret."""
        self._blind = blind
        self._by_place: dict[bytes, tuple[bytes, ApiKey]] = {}
        self._by_id: dict[str, ApiKey] = {}
        for key in keys:
            if key.key_id in self._by_id:
                raise BadKeys(f"keys.{key.key_id}: there are two keys of this name")
            self._by_id[key.key_id] = key
            for one in key.digests:
                place = self._place(one)
                if place in self._by_place:
                    raise BadKeys(f"keys.{key.key_id}.hash: keys.{self._by_place[place][1].key_id} has the same one")
                self._by_place[place] = (one, key)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._by_id

    def find(self, secret: bytes, now_s: float) -> ApiKey | None:
        """The key of this secret if it is valid at `now_s`, seconds since 1970."""
        shown = digest(secret[: MAX_KEY_BYTES + 1])
        known, key = self._by_place.get(self._place(shown), (_NOBODY, None))
        is_same = hmac.compare_digest(known, shown)
        if key is None or not is_same or (key.expires_s is not None and now_s >= key.expires_s):
            return None
        return key

    def _place(self, secret_digest: bytes) -> bytes:
        return hmac.digest(self._blind, secret_digest, "sha256")


def read_pairs(pairs: Iterable[str]) -> list[ApiKey]:
    """Keys without limits, from `ID=sha256:HEX`. Raises BadKeys."""
    keys = []
    for index, pair in enumerate(pairs):
        key_id, _, shown = pair.partition("=")
        if not KEY_NAME.fullmatch(key_id):
            raise BadKeys(f"entry {index + 1} must be ID=HASH, the id {KEY_NAME_FORM}")
        try:
            keys.append(ApiKey(key_id=key_id, digests=(read_hash(shown),), tenant=key_id))
        except ValueError as error:
            raise BadKeys(f"{key_id}: the hash {error}") from error
    return keys


def secret_of(authorization: str, api_key: str) -> bytes:
    """What a caller shows: the bearer token of `Authorization`, else `x-api-key`; empty if neither."""
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode()
    return api_key.strip().encode()
