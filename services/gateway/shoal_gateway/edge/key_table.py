"""The text of a keys file: TOML, one table `keys.<id>` a key. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from shoal_common.api_keys import KEY_NAME, KEY_NAME_FORM, read_hash

from shoal_gateway.edge.keys import ApiKey, BadKeys
from shoal_gateway.edge.limits import Limits

MAX_KEYS = 100_000
_MAX_HASHES = 8
_MAX_LIMIT = 10**12
_MAX_PRIORITY = 1000
_MAX_TENANT_CHARS = 128
_LIMITS = ("max_concurrency", "requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
_FIELDS = frozenset({"hash", "tenant", "priority", "expires", "cached_input_weight", *_LIMITS})


def read_table(text: str) -> list[ApiKey]:
    """All keys of a file. Raises BadKeys, which names the line or the field."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadKeys(f"not valid TOML: {error}") from error
    unknown = sorted(set(document) - {"keys"})
    if unknown:
        raise BadKeys(f"{unknown[0]}: is unknown; a keys file holds tables [keys.ID]")
    table = document.get("keys")
    # An empty file is what a write that was cut short leaves; that no key is valid has to be said.
    if not isinstance(table, dict):
        raise BadKeys("there is no table of keys; write an empty [keys] if no key is to be valid")
    if len(table) > MAX_KEYS:
        raise BadKeys(f"there are {len(table)} keys, at most {MAX_KEYS} may be")
    return [_key(key_id, values) for key_id, values in table.items()]


def _key(key_id: str, values: Any) -> ApiKey:
    if not KEY_NAME.fullmatch(key_id):
        raise BadKeys(f"keys.{key_id[:64]!r}: a name has {KEY_NAME_FORM}")
    path = f"keys.{key_id}"
    if not isinstance(values, dict):
        raise BadKeys(f"{path}: must be a table")
    unknown = sorted(set(values) - _FIELDS)
    if unknown:
        raise BadKeys(f"{path}.{unknown[0]}: is unknown; known are {', '.join(sorted(_FIELDS))}")
    tenant = values.get("tenant", key_id)
    if not isinstance(tenant, str) or not 1 <= len(tenant) <= _MAX_TENANT_CHARS:
        raise BadKeys(f"{path}.tenant: must be a string of 1 to {_MAX_TENANT_CHARS} characters")
    weight = values.get("cached_input_weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise BadKeys(f"{path}.cached_input_weight: must be a number in [0, 1]")
    return ApiKey(
        key_id=key_id,
        digests=_digests(values.get("hash"), path),
        tenant=tenant,
        priority=_integer(values, "priority", path, -_MAX_PRIORITY, _MAX_PRIORITY) or 0,
        expires_s=_expiry(values.get("expires"), path),
        limits=Limits(
            **{name: _integer(values, name, path, 1, _MAX_LIMIT) for name in _LIMITS},
            cached_input_weight=float(weight),
        ),
    )


def _digests(value: Any, path: str) -> tuple[bytes, ...]:
    shown = [value] if isinstance(value, str) else value
    if not isinstance(shown, list) or not 1 <= len(shown) <= _MAX_HASHES:
        raise BadKeys(f"{path}.hash: must be a hash or a list of 1 to {_MAX_HASHES}")
    try:
        return tuple(read_hash(one if isinstance(one, str) else "") for one in shown)
    except ValueError as error:
        raise BadKeys(f"{path}.hash: {error}") from error


def _integer(values: Mapping[str, Any], name: str, path: str, low: int, high: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadKeys(f"{path}.{name}: must be an integer in [{low}, {high}]")
    return value


def _expiry(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise BadKeys(f"{path}.expires: must be a date and time with its offset, as 2027-01-31T00:00:00Z")
    return value.timestamp()
