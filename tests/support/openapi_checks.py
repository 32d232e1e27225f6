"""Loaded by schemathesis: the checks that its own cannot make, and a record of what was answered.

SHOAL_OPENAPI_RECORD   file for {"METHOD path": {"status content-type": count}}
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import schemathesis

_RECORD: dict[str, Counter[str]] = defaultdict(Counter)
# The mock rank compiles no constraints, and nobody else is there to.
_NO_ENGINE = "the last with CONSTRAINT_MISMATCH"


@schemathesis.check
def no_server_fault(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> bool | None:
    """No 5xx, but for what a mesh of mock ranks cannot do."""
    content_type = (response.headers.get("content-type") or ["-"])[0].partition(";")[0]
    _RECORD[f"{case.operation.method.upper()} {case.operation.path}"][f"{response.status_code} {content_type}"] += 1
    if response.status_code >= 500 and _NO_ENGINE not in response.text:
        raise AssertionError(f"{response.status_code}: {response.text[:500]}")
    return None


@atexit.register
def _write() -> None:
    target = os.environ.get("SHOAL_OPENAPI_RECORD")
    if target:
        Path(target).write_text(json.dumps(_RECORD))
