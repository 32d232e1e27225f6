"""Names of what is equal: models, numerics, constraints, drafts, prompt prefixes, tenants. Pure, the same everywhere.

Everything hashed is length-prefixed, so that no two different inputs have one encoding. Source: the mesh's design,
KV identity and units.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence

BLOCK_TOKENS = 128
"""Tokens of a block, in every model."""
HASH_BYTES = 32
_ID_CHARS = 32


def encode(*parts: str | bytes) -> bytes:
    """The parts, each after its length (8 bytes, little-endian) and a type byte: text and bytes never collide."""
    out = bytearray()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        out += struct.pack("<cQ", b"s" if isinstance(part, str) else b"b", len(raw)) + raw
    return bytes(out)


def encode_mapping(values: Mapping[str, str]) -> bytes:
    """A mapping in the order of its keys."""
    return encode(*(part for key in sorted(values) for part in (key, values[key])))


def _id(kind: str, *parts: str | bytes) -> str:
    return hashlib.sha256(encode(f"shoal.{kind}.v1", *parts)).hexdigest()[:_ID_CHARS]


def kv_id(*, weights_revision: str, layout: str, formats: str, tokenizer: str) -> str:
    """What KV bytes mean: equal ids may exchange blocks. 32 hex digits. Each argument is itself a digest or version."""
    return _id("kv", weights_revision, layout, formats, tokenizer)


def numerics_id(
    *, kv_id: str, kernels: str, accelerator: str, parallel: str, replay_mode: str, replay_tokens: int, invariant: bool
) -> str:
    """Which bits come out: prefill, decode and resumption pair only within one id. 32 hex digits.

    kernels        kernel set and version
    accelerator    accelerator class; on CPU the ISA level and the torch version
    parallel       the parallel degrees that change the order of reductions
    replay_tokens  K
    invariant      a row's bits do not depend on its batch
    """
    return _id(
        "numerics", kv_id, kernels, accelerator, parallel, replay_mode, str(replay_tokens), "1" if invariant else "0"
    )


def constraint_id(*, engine_versions: Mapping[str, str], routing: Mapping[str, str]) -> str:
    """How constraints are enforced: engine versions, and which engine takes which constraint. 32 hex digits."""
    return _id("constraint", encode_mapping(engine_versions), encode_mapping(routing))


def draft_id(*, draft_weights_revision: str) -> str:
    """Which draft head's windows these are. 32 hex digits."""
    return _id("draft", draft_weights_revision)


def root_hash(*, kv_id: str, numerics_id: str, tenant_salt: bytes) -> bytes:
    """Parent of the first block's hash: prefixes of other models, numerics or tenants never meet. 32 bytes."""
    return hashlib.sha256(encode("shoal.root.v1", kv_id, numerics_id, tenant_salt)).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], image_hashes: Iterable[bytes] = ()) -> bytes:
    """SHA-256 over the parent hash, the 128 ids as little-endian uint32, then the content hashes of images. 32 bytes.

    Raises ValueError for a parent that is not 32 bytes, another number of ids, or an id outside of uint32.
    """
    if len(parent) != HASH_BYTES:
        raise ValueError(f"a parent hash has {HASH_BYTES} bytes, got {len(parent)}")
    if len(token_ids) != BLOCK_TOKENS:
        raise ValueError(f"a block has {BLOCK_TOKENS} tokens, got {len(token_ids)}")
    try:
        packed = struct.pack(f"<{BLOCK_TOKENS}I", *token_ids)
    except struct.error as error:
        raise ValueError("a token id is outside of uint32") from error
    digest = hashlib.sha256(parent + packed)
    for image in image_hashes:
        if len(image) != HASH_BYTES:
            raise ValueError(f"an image hash has {HASH_BYTES} bytes, got {len(image)}")
        digest.update(image)
    return digest.digest()


def block_hashes(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Hashes of all full blocks of a text-only prompt, in position order; a rest below 128 tokens has none."""
    chain, parent = [], root
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = block_hash(parent, token_ids[start : start + BLOCK_TOKENS])
        chain.append(parent)
    return chain


def tenant_salt(secret: str, *, tenant: str, user_id: str) -> bytes:
    """Keeps one user's prefixes from another's. The secret is SHOAL_CACHE_SECRET, equal on all gateways. 32 bytes."""
    return hmac.digest(secret.encode(), encode("shoal.salt.v1", tenant, user_id), "sha256")


def tenant_tag(secret: str, *, tenant: str) -> bytes:
    """Names a tenant to kv_cache, for flush and quotas, without telling who it is. 32 bytes."""
    return hmac.digest(secret.encode(), encode("shoal.tag.v1", tenant), "sha256")
