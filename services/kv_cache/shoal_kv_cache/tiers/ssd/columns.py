"""Records of many batches as rows of one array: what a start does with millions of them it does by columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shoal_kv_cache.core.entries import Entry, Key
from shoal_kv_cache.tiers.descriptions import GroupForm, Malformed, kind_of
from shoal_kv_cache.tiers.ssd.catalog import Catalog
from shoal_kv_cache.tiers.ssd.layout import PAGE_BITS, RECORD_ROW, FileHeader, decode_forms, split_records
from shoal_kv_cache.tiers.ssd.values import Recovered

_CHUNK = 4096

Rows = npt.NDArray[np.void]
Locations = npt.NDArray[np.uint64]


class Columns:
    """Grows by batches; then `living` says which records count. 200 bytes a record while a start lasts."""

    def __init__(self) -> None:
        self._forms: list[GroupForm] = []
        self._known: dict[tuple[int, bytes], int] = {}
        self._bytes = bytearray()
        self._counts: list[int] = []
        self._numbers: list[int] = []
        self._first_forms: list[int] = []
        self._last = ((0, 0), (0, 0))

    def add(self, header: FileHeader, page: int, data: bytes) -> None:
        """A batch of records, by its header. Raises Malformed, also if it lies in the one that was added before."""
        page_count, body = split_records(header, page, data)
        place = (header.number, page)
        if self._last[0] <= place < self._last[1]:
            raise Malformed("batches overlap")
        self._last = (place, (header.number, page + page_count))
        forms = (body.form_count, body.forms)
        first_form = self._known.get(forms)
        if first_form is None:
            first_form = self._known[forms] = len(self._forms)
            self._forms += decode_forms(body.forms, body.form_count)
        self._bytes += body.records
        self._counts.append(body.record_count)
        self._numbers.append(header.number)
        self._first_forms.append(first_form)

    def living(self, catalog: Catalog) -> tuple[Rows, Locations]:
        """The records whose places live, and these. Ends what compaction has copied and what is no record at all."""
        rows: Rows = np.frombuffer(self._bytes, RECORD_ROW)
        counts = np.array(self._counts, np.int64)
        numbers = np.repeat(np.array(self._numbers, np.uint64), counts)
        locations = numbers << np.uint64(PAGE_BITS) | rows["page"]
        rows["form_index"] += np.repeat(np.array(self._first_forms, np.uint32), counts)
        alive = catalog.are_live(locations)
        rows, locations, self._bytes = rows[alive], locations[alive], bytearray()
        replaced = rows["replaces"][rows["replaces"] != 0]
        # The copy may be compacted away before what it was copied from: that needs a tombstone of its own.
        dead = [int(location) for location in replaced[catalog.are_live(replaced)] if catalog.kill(int(location))]
        catalog.unwritten.update(dead)
        if dead:
            alive = ~np.isin(locations, np.array(dead, np.uint64))
            rows, locations = rows[alive], locations[alive]
        return rows, locations

    def entries(self, rows: Rows, locations: Locations, catalog: Catalog) -> Iterator[Recovered]:
        """Descriptions, parents before children; not of what is removed before its turn comes."""
        order = np.argsort(rows["position_end"], kind="stable")
        for begin in range(0, len(order), _CHUNK):
            chosen = order[begin : begin + _CHUNK]
            some, places = rows[chosen], locations[chosen]
            columns = [some[name].tolist() for name in ("kind", "form_index", "block_hash", "parent_hash")]
            ends, checksums = some["position_end"].tolist(), some["checksum"].tolist()
            for kind, form, block_hash, parent_hash, end, checksum, location, is_live in zip(
                *columns, ends, checksums, places.tolist(), catalog.are_live(places).tolist(), strict=True
            ):
                if is_live:
                    group, shape = self._forms[form]
                    entry = Entry(Key(kind_of(kind), block_hash), group, parent_hash, end, shape, checksum)
                    yield Recovered(entry, location)
