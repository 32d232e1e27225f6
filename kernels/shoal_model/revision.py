"""Identity of the weights: what makes two checkpoints the same model, whatever their shards and folders are called.

`weights` goes into kv_id: it changes with anything that changes a cached byte or the next token. `draft` names the
draft head alone, which may be exchanged without touching either.

Hashed are the parsed configuration, the bytes of tokenizer.json and, tensor by tensor in the order of the inventory,
name, type, shape and content. Content is every byte up to `FULL_CONTENT_BYTES` of checkpoint. Above it, it is 4 KiB
from the middle of each tensor, of the routed experts only of expert 0: minutes of reading become seconds. Training
moves all of these; a large checkpoint patched by hand elsewhere needs a new revision name of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal_model.checkpoint import Checkpoint, TensorLocation
from shoal_model.errors import CheckpointError

FULL_CONTENT_BYTES = 1 << 30
"""Largest checkpoint of which every byte is hashed."""

SAMPLE_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_SCHEME = b"shoal weights revision 1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRevision:
    """Hex SHA-256 digests. `draft` is None for a checkpoint without a draft head."""

    weights: str
    draft: str | None


def weights_revision(checkpoint: Checkpoint, *, full_content_bytes: int = FULL_CONTENT_BYTES) -> WeightsRevision:
    """Hash an opened checkpoint. Raises CheckpointError if a file cannot be read."""
    locations = checkpoint.tensors.values()
    sampled = sum(location.spec.bytes for location in locations) > full_content_bytes
    config = asdict(checkpoint.config)
    draft_config = config.pop("dspark")
    tokenizer = _read(checkpoint.directory / "tokenizer.json")
    draft = [location for location in locations if location.spec.draft_block is not None]
    backbone = [location for location in locations if location.spec.draft_block is None]
    return WeightsRevision(
        weights=_digest([_canonical_json(config), tokenizer], backbone, sampled),
        draft=_digest([_canonical_json(draft_config)], draft, sampled) if draft else None,
    )


def _digest(preamble: Iterable[bytes], locations: Iterable[TensorLocation], sampled: bool) -> str:
    digest = hashlib.sha256(_SCHEME + (b"sampled\n" if sampled else b"full\n"))
    for part in preamble:
        digest.update(len(part).to_bytes(8, "little") + part)
    for location in locations:
        spec = location.spec
        digest.update(_canonical_json([spec.name, spec.storage.value, spec.shape]))
        if not sampled:
            _update(digest, location, 0, spec.bytes)
        elif ".experts." not in spec.name or ".experts.0." in spec.name:
            length = min(SAMPLE_BYTES, spec.bytes)
            _update(digest, location, (spec.bytes - length) // 2, length)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, location: TensorLocation, start: int, length: int) -> None:
    try:
        with location.path.open("rb", buffering=0) as file:
            file.seek(location.offset + start)
            while length:
                chunk = file.read(min(length, _CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(location.path, f"was cut short while {location.spec.name} was read")
                digest.update(chunk)
                length -= len(chunk)
    except OSError as error:
        raise CheckpointError(location.path, f"cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
