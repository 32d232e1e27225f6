"""Which engine takes which constraint: the same in every process of the mesh, whatever is installed there.

The engines' versions and this table make up the `constraint_id` that decode workers announce.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shoal_common import identity
from shoal_common.constraints.kinds import ConstraintKind

LLGUIDANCE = "llguidance"
"""Earley parsing over a derivative lexer; a wheel of 3 MB without dependencies."""
RULES = "shoal 4"
"""How constraints become grammars (`shoal_engine.constraints`), which counts as part of every engine. Raise it with any
change that can change a mask."""
TABLE: Mapping[ConstraintKind, str] = MappingProxyType(dict.fromkeys(ConstraintKind, LLGUIDANCE))


def engine_of(kind: ConstraintKind) -> str:
    """The engine that compiles constraints of this kind."""
    return TABLE[kind]


def constraint_id(versions: Mapping[str, str]) -> str:
    """What a decode worker with these engine versions announces. 32 hex digits."""
    routing = {kind.value: engine for kind, engine in TABLE.items()}
    return identity.constraint_id(engine_versions={**versions, "rules": RULES}, routing=routing)
