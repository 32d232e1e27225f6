"""Groups and forms by small numbers, and what each group and tenant holds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal_kv_cache.core.entries import Form, Group
from shoal_kv_cache.core.table import MAX_GROUPS, IndexFull

_MAX_FORMS = 1 << 16


@dataclass(slots=True)
class TierUse:
    """What one tier holds of a group or a tenant."""

    block_count: int = 0
    snapshot_count: int = 0
    used_bytes: int = 0


@dataclass(slots=True)
class GroupRecord:
    """A group, its number and what memory and disk hold of it. The first block tells the form of all its blocks."""

    number: int
    group: Group
    tenant: int
    block_form: Form | None = None
    use: tuple[TierUse, TierUse] = field(default_factory=lambda: (TierUse(), TierUse()))

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is visible."""
        return not any(use.block_count or use.snapshot_count for use in self.use)


class Groups:
    """Numbers of groups and of forms. Invariant: a number is used again only after its group has become empty."""

    def __init__(self) -> None:
        self.records: list[GroupRecord | None] = []
        self.tenant_tags: list[bytes] = []
        self.tenant_bytes = (array("q"), array("q"))  # in memory and on disk, by tenant number
        self._tenant_numbers: dict[bytes, int] = {}
        self._free_tenants: list[int] = []
        self.block_bytes = array("q")  # by group number; 0 until the first block tells
        self.forms: list[Form] = []
        self.form_bytes = array("q")
        self._numbers: dict[Group, int] = {}
        self._form_numbers: dict[Form, int] = {}

    def find(self, group: Group) -> GroupRecord | None:
        """The record, if the group is known."""
        number = self._numbers.get(group)
        return None if number is None else self.records[number]

    def of(self, number: int) -> GroupRecord:
        """The record of a number in use."""
        record = self.records[number]
        assert record is not None
        return record

    def intern(self, group: Group) -> GroupRecord:
        """The record; a new one if need be. Raises IndexFull when too many groups have something."""
        record = self.find(group)
        if record is not None:
            return record
        if len(self.records) >= MAX_GROUPS:
            self._forget_empty()
        number = next((n for n, one in enumerate(self.records) if one is None), len(self.records))
        if number >= MAX_GROUPS:
            raise IndexFull(f"{MAX_GROUPS} groups hold something", max_groups=MAX_GROUPS)
        record = GroupRecord(number, group, self._tenant(group.tenant_tag))
        if number == len(self.records):
            self.records.append(record)
            self.block_bytes.append(0)
        else:
            self.block_bytes[number] = 0
            self.records[number] = record
        self._numbers[group] = number
        return record

    def form_number(self, form: Form) -> int | None:
        """The number of a form; None when there are too many kinds."""
        number = self._form_numbers.get(form)
        if number is None and len(self.forms) < _MAX_FORMS:
            number = self._form_numbers[form] = len(self.forms)
            self.forms.append(form)
            self.form_bytes.append(form.size_bytes)
        return number

    def set_block_form(self, record: GroupRecord, form: Form) -> None:
        """The form of the group's blocks is known."""
        record.block_form = form
        self.block_bytes[record.number] = form.size_bytes

    def tenant_number(self, tag: bytes) -> int | None:
        """The number of a tenant that has something, or had."""
        return self._tenant_numbers.get(tag)

    def of_tenant(self, tenant: int) -> NDArray[np.bool_]:
        """Whether each group number is of this tenant."""
        return np.array([one is not None and one.tenant == tenant for one in self.records], np.bool_)

    def live(self) -> list[GroupRecord]:
        """Records of groups that hold something."""
        return [record for record in self.records if record is not None and not record.is_empty]

    def _forget_empty(self) -> None:
        for number, record in enumerate(self.records):
            if record is not None and record.is_empty:
                self.records[number] = None
                del self._numbers[record.group]
        used = {record.tenant for record in self.records if record is not None}
        self._free_tenants = [number for number in range(len(self.tenant_tags)) if number not in used]
        self._tenant_numbers = {tag: n for tag, n in self._tenant_numbers.items() if n in used}

    def _tenant(self, tag: bytes) -> int:
        number = self._tenant_numbers.get(tag)
        if number is not None:
            return number
        if self._free_tenants:
            number = self._free_tenants.pop()
            self.tenant_tags[number] = tag
        else:
            number = len(self.tenant_tags)
            self.tenant_tags.append(tag)
            for used in self.tenant_bytes:
                used.append(0)
        self._tenant_numbers[tag] = number
        return number
