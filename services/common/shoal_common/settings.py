"""Settings of a process: a frozen dataclass, filled from flags, then the environment, then its defaults.

`SHOAL_<SERVICE>_<FIELD>` and `--field` set a field of the service's dataclass, `SHOAL_<FIELD>` one of SharedSettings.
Secrets have no flag: command lines are public. Read once, in `main`; nothing else reads the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shoal_common import logs

T = TypeVar("T")
SECRET = {"secret": True}
"""Metadata of a field that is never shown: `dataclasses.field(default="", metadata=SECRET)`."""
TRANSFER_ENGINES = frozenset({"nixl", "mooncake"})
_MESH_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_CREDENTIALS = re.compile(r"://[^@/\s]+@")
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    """What all services of a mesh have in common."""

    mesh: str = "local"
    nats_url: str = "nats://127.0.0.1:4222"
    cache_secret: str = dataclasses.field(default="", metadata=SECRET)
    transfer_engines: str = ""
    direct_calls: bool = True
    log_level: str = "INFO"
    otlp_endpoint: str | None = dataclasses.field(default=None, metadata={"env": "OTEL_EXPORTER_OTLP_ENDPOINT"})

    def __post_init__(self) -> None:
        if not _MESH_NAME.fullmatch(self.mesh):
            raise ValueError(f"SHOAL_MESH must be 1 to 31 of a-z, 0-9 and -, got {self.mesh!r}")
        if self.nats_url != "off" and not self.nats_url.startswith(("nats://", "tls://")):
            shown = without_credentials(self.nats_url)
            raise ValueError(f"SHOAL_NATS_URL must be nats://HOST:PORT, tls://HOST:PORT or off, got {shown!r}")
        unknown = sorted(set(self.transfer_engine_names) - TRANSFER_ENGINES)
        if unknown:
            known = ", ".join(sorted(TRANSFER_ENGINES))
            raise ValueError(f"SHOAL_TRANSFER_ENGINES must be some of {known}, by commas, got {', '.join(unknown)}")
        if self.log_level not in logs.LEVELS:
            raise ValueError(f"SHOAL_LOG_LEVEL must be one of {', '.join(logs.LEVELS)}, got {self.log_level!r}")

    @property
    def transfer_engine_names(self) -> tuple[str, ...]:
        """Engines that move KV bytes beside shared memory, the byte stream and gRPC, where both sides have them."""
        return tuple(name.strip() for name in self.transfer_engines.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """The settings in force, how to show them, and a hash that differs when any of them does."""

    service: T
    shared: SharedSettings
    effective: Mapping[str, str]
    config_hash: str


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field: where its value may come from."""

    name: str
    env: str
    kind: Any
    is_secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def load(kind: type[T], *, service: str, environ: Mapping[str, str], argv: Sequence[str]) -> Loaded[T]:
    """The settings of `service`. Raises ValueError with the variable's full name for an unknown or a bad one."""
    prefix = f"SHOAL_{service.upper()}_"
    own, common = _settings(kind, prefix), _settings(SharedSettings, "SHOAL_")
    unknown = sorted({key for key in environ if key.startswith(prefix)} - {one.env for one in own})
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}; known are {', '.join(one.env for one in own)}")
    flags = _parse_flags([*own, *common], service, argv)
    mine = kind(**_values(own, environ, flags))
    shared = SharedSettings(**_values(common, environ, flags))
    effective = {one.env: _shown(one, getattr(mine, one.name)) for one in own}
    effective |= {one.env: _shown(one, getattr(shared, one.name)) for one in common}
    return Loaded(mine, shared, effective, _hash([(own, mine), (common, shared)]))


def load_or_exit(kind: type[T], *, service: str, environ: Mapping[str, str], argv: Sequence[str]) -> Loaded[T]:
    """`load` for a `main`: a bad setting is one line on standard error and exit status 2.

    `--check-config` among the arguments prints the effective settings as JSON, secrets masked, and exits with 0.
    """
    arguments = [one for one in argv if one != "--check-config"]
    try:
        loaded = load(kind, service=service, environ=environ, argv=arguments)
    except ValueError as error:
        print(f"shoal {service}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if len(arguments) != len(argv):
        print(json.dumps({"settings": dict(loaded.effective), "hash": loaded.config_hash}, indent=2))
        raise SystemExit(0)
    return loaded


def _settings(kind: type[Any], prefix: str) -> list[_Setting]:
    hints = typing.get_type_hints(kind)
    return [
        _Setting(
            name=field.name,
            env=field.metadata.get("env", prefix + field.name.upper()),
            kind=hints[field.name],
            is_secret=bool(field.metadata.get("secret")),
        )
        for field in dataclasses.fields(kind)
    ]


def _parse_flags(settings: Sequence[_Setting], service: str, argv: Sequence[str]) -> dict[str, str]:
    parser = argparse.ArgumentParser(prog=f"shoal-{service.replace('_', '-')}", allow_abbrev=False)
    parser.add_argument("--check-config", action="store_true", help="print the effective settings and exit")
    for one in settings:
        if not one.is_secret:
            parser.add_argument(one.flag, dest=one.env, metavar="VALUE", help=f"also {one.env}")
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}


def _values(settings: Sequence[_Setting], environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for one in settings:
        raw = flags.get(one.env, environ.get(one.env))
        if raw is not None:
            try:
                values[one.name] = _convert(one.kind, raw)
            except ValueError as error:
                shown = "the value given" if one.is_secret else repr(raw)
                raise ValueError(f"{one.env} must be {_describe(one.kind)}, got {shown}") from error
    return values


def _convert(kind: Any, raw: str) -> Any:
    """The text as a value of `kind`: str, int, float, bool, Literal, tuple[X, ...] (commas), or X | None (empty)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in arguments if one is not type(None))
        return None if raw == "" else _convert(inner, raw)
    if origin is tuple:
        return tuple(_convert(arguments[0], part.strip()) for part in raw.split(",") if part.strip())
    if origin is typing.Literal:
        if raw not in arguments:
            raise ValueError(raw)
        return raw
    if kind is bool:
        if raw.lower() not in _BOOLS:
            raise ValueError(raw)
        return _BOOLS[raw.lower()]
    if kind in (str, int, float):
        return kind(raw)
    raise TypeError(f"settings cannot be of type {kind}")


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    return {int: "an integer", float: "a number", bool: "true or false"}.get(kind, str(kind))


def _shown(one: _Setting, value: object) -> str:
    if one.is_secret:
        return "***" if value else ""
    return "" if value is None else without_credentials(str(value))


def without_credentials(url: str) -> str:
    """The text with what stands between `://` and `@` masked."""
    return _CREDENTIALS.sub("://***@", url)


def _hash(parts: Sequence[tuple[Sequence[_Setting], object]]) -> str:
    """Secrets take part only by being set or not: the hash is public."""
    lines = [f"{one.env}={_shown(one, getattr(values, one.name))!r}" for settings, values in parts for one in settings]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
