"""How much each tenant may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Bytes that a tenant may hold in memory and on disk, over all its groups; None: no bound of its own.

    A quota is not a reservation: what others leave free may be used, and a tenant over its quota loses its own first.
    """

    ram_bytes: int | None = None
    ssd_bytes: int | None = None
    ram_bytes_of: Mapping[bytes, int] = field(default_factory=dict)
    ssd_bytes_of: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def is_unlimited(self) -> bool:
        """Whether nobody has a quota."""
        has_default = self.ram_bytes is not None or self.ssd_bytes is not None
        return not (has_default or self.ram_bytes_of or self.ssd_bytes_of)

    def ram(self, tenant_tag: bytes) -> int | None:
        """Bytes in memory for this tenant."""
        return self.ram_bytes_of.get(tenant_tag, self.ram_bytes)

    def ssd(self, tenant_tag: bytes) -> int | None:
        """Bytes on disk for this tenant."""
        return self.ssd_bytes_of.get(tenant_tag, self.ssd_bytes)
