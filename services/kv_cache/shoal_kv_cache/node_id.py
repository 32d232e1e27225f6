"""The name by which a node owns segments, the same after a restart where there is a disk to keep it on."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from shoal_common.errors import FailedPrecondition

logger = logging.getLogger(__name__)

_FILE = "node_id"
_MAX_CHARS = 64


def stable_node_id(*, configured: str, ssd_directory: Path | None, instance_id: str) -> str:
    """The setting, else the one kept on disk (made at the first start), else the instance's, new at every start.

    A disk that takes no writes keeps no new name: the instance's then. Raises FailedPrecondition (NODE_ID_UNREADABLE)
    where it has a name that cannot be read.
    """
    if configured:
        return configured
    if ssd_directory is None:
        return instance_id
    path = ssd_directory / _FILE
    try:
        if path.exists():
            kept = path.read_text(encoding="ascii").strip()
            if not 0 < len(kept) <= _MAX_CHARS:
                raise ValueError(f"{len(kept)} characters")
            return kept
    except (OSError, ValueError) as error:
        raise FailedPrecondition(
            f"the name of this node in {path}: {error}", reason="NODE_ID_UNREADABLE", path=path
        ) from error
    made = f"node-{secrets.token_hex(8)}"
    try:
        partial = path.with_suffix(".new")
        partial.write_text(made + "\n", encoding="ascii")
        partial.replace(path)
    except OSError as error:
        logger.warning("the name of this node is not kept", extra={"path": str(path), "error": str(error)})
        return instance_id
    return made
