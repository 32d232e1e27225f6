"""Opens the engines that are asked for and installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

from shoal_common.kv_transport.engines.engine import EngineFailed, TransferEngine

logger = logging.getLogger(__name__)

ENGINES = {
    "nixl": "shoal_common.kv_transport.engines.nixl:open_nixl",
    "mooncake": "shoal_common.kv_transport.engines.mooncake:open_mooncake",
}
"""By name, best first: the function that opens it, given the host that others reach this process by."""


def open_engines(names: Iterable[str], *, host: str) -> list[TransferEngine]:
    """Those of `names` that can be opened here, best first; the others are told once. Raises ValueError for a name."""
    wanted = set(names)
    unknown = sorted(wanted - set(ENGINES))
    if unknown:
        raise ValueError(f"transfer engines are {', '.join(ENGINES)}, got {', '.join(unknown)}")
    opened = []
    for name in (one for one in ENGINES if one in wanted):
        module, _, function = ENGINES[name].partition(":")
        try:
            opened.append(getattr(importlib.import_module(module), function)(host))
        except EngineFailed as error:
            logger.warning("transfer engine not available", extra={"engine": name, "error": error.message})
    return opened
