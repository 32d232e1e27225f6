"""API keys as the command makes them and the gateway checks them. Pure.

A key has 256 random bits, so a plain digest of it can neither be guessed nor searched; one that a person thought up
could be, which is why short ones are refused.
"""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "sk-shoal-"
"""What our keys begin with, so that scanners for leaked secrets can know them."""
MIN_KEY_CHARS = 24
MAX_KEY_BYTES = 512
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
KEY_NAME_FORM = "1 to 64 letters, digits, underscores and dashes"
_SCHEME = "sha256:"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_RANDOM_BYTES = 32


def new_key() -> str:
    """A key that nobody has seen."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest(key: bytes) -> bytes:
    """What is kept of a key, 32 bytes."""
    return hashlib.sha256(key).digest()


def hash_of(key: str) -> str:
    """A key as it stands in a keys file: `sha256:` and 64 hex digits. Raises ValueError for one that is no good key."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key is printable ASCII without spaces")
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_CHARS} to {MAX_KEY_BYTES} characters, got {len(key)}")
    return _SCHEME + digest(key.encode()).hex()


def read_hash(text: str) -> bytes:
    """The digest in what `hash_of` made. Raises ValueError for anything else, without repeating it."""
    found = _HASH.fullmatch(text)
    if found is None:
        # It may be the key itself.
        raise ValueError("must be sha256: and 64 hex digits, as `shoal key hash` prints it")
    return bytes.fromhex(found.group(1))
