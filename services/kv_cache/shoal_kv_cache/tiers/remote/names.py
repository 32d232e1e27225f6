"""Names of payloads in a store outside of the mesh. Pure."""

from __future__ import annotations

import hashlib
from typing import NamedTuple
from urllib.parse import quote

from shoal_kv_cache.core.entries import Group, Key, Kind

PREFIX = "shoal:1"
_MAX_PART = 80
_KIND_LETTERS = {Kind.BLOCK: "b", Kind.SNAPSHOT: "s"}


class Name(NamedTuple):
    """A payload's whole name: everything that a flush can ask for is in it."""

    group: Group
    key: Key

    @property
    def text(self) -> str:
        """Parts between colons; no part has a colon, a slash, or a character that a pattern would take for its own."""
        kv_id, numerics_id, tag = group_parts(self.group)
        return f"{PREFIX}:{kv_id}:{numerics_id}:{tag}:{self.leaf}"

    @property
    def leaf(self) -> str:
        """Kind and hash."""
        return f"{_KIND_LETTERS[self.key.kind]}-{self.key.block_hash.hex()}"


def part(text: str) -> str:
    """An id as part of a name: bounded, and unambiguous."""
    quoted = quote(text, safe="").replace("~", "%7E").replace(".", "%2E")
    return quoted if len(quoted) <= _MAX_PART else "%" + hashlib.sha256(text.encode()).hexdigest()


def tag_part(tenant_tag: bytes) -> str:
    """A tenant's tag as part of a name."""
    text = tenant_tag.hex()
    return text if len(text) <= _MAX_PART else "%" + hashlib.sha256(tenant_tag).hexdigest()


def group_parts(group: Group) -> tuple[str, str, str]:
    """A group's parts of a name."""
    return part(group.kv_id), part(group.numerics_id), tag_part(group.tenant_tag)


class Pattern(NamedTuple):
    """Groups that a flush is for; None matches all."""

    kv_id: str | None
    tenant_tag: bytes | None

    @property
    def parts(self) -> tuple[str | None, str | None]:
        """Their parts of a name."""
        kv_part = None if self.kv_id is None else part(self.kv_id)
        return kv_part, None if self.tenant_tag is None else tag_part(self.tenant_tag)

    def matches(self, kv_part: str, tag: str) -> bool:
        """Whether a name with these parts is meant."""
        wanted_kv, wanted_tag = self.parts
        return wanted_kv in (None, kv_part) and wanted_tag in (None, tag)
