"""Index keys, queries and block tables for tests of the indexer on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from shoal_kernels import SERVED, SERVED_BF16, PagedRows, index_format
from shoal_kernels.ops.cast import cast_q4ue
from support.on_device import DEVICE
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Arguments of the indexer on the device, and the same on the host in float32."""

    query: Tensor
    weights: Tensor
    keys: PagedRows
    table: Tensor
    row_seq: Tensor
    n_vis: Tensor

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor, PagedRows, Tensor, Tensor, Tensor]:
        """Arguments of an operation for some rows."""
        return (
            self.query[rows],
            self.weights[rows],
            self.keys,
            self.table,
            self.row_seq[rows],
            self.n_vis[rows],
        )

    @property
    def all(self) -> tuple[Tensor, Tensor, PagedRows, Tensor, Tensor, Tensor]:
        """Arguments of an operation for all rows."""
        return self.query, self.weights, self.keys, self.table, self.row_seq, self.n_vis

    def on_host(self) -> tuple[Tensor, Tensor, PagedRows, Tensor, Tensor, Tensor]:
        """Arguments of an operation of the host in precision SERVED."""
        layout = index_format(self.keys.format.dim, SERVED)
        keys = self.keys
        cache = PagedRows(keys.storage.cpu(), keys.offset, keys.entries_per_block, layout, keys.page_split)
        return (
            self.query.float().cpu(),
            self.weights.float().cpu(),
            cache,
            self.table.cpu(),
            self.row_seq.cpu(),
            self.n_vis.cpu(),
        )


def index_rows(
    row_seq: list[int],
    n_vis: list[int],
    *,
    heads: int,
    dim: int,
    entries: int,
    blocks: int,
    seed: int,
    page_split: bool = True,
    coarse_values: bool = False,
    uneven: bool = False,
) -> IndexRows:
    """Random rows over sequences of `blocks` blocks of `entries` entries each, in shuffled places of the storage.

    coarse_values draws all keys of few, so that scores tie in great numbers. uneven gives the groups of 32 dimensions
    of a key scales up to 2^16 apart.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, sequences = len(row_seq), max(row_seq, default=0) + 1
    layout = index_format(dim, SERVED_BF16)
    offset, places = 64, blocks * sequences * entries
    storage = torch.full((blocks * sequences + 1, offset + entries * layout.units + 32), 0x77, dtype=torch.uint8)
    values = torch.randn(places, dim, generator=generator)
    values *= torch.exp2(torch.randint(-3, 4, (places, 1), generator=generator).float())
    if coarse_values:
        values = values[torch.randint(0, 5, (places,), generator=generator)]
    if uneven:
        apart = torch.exp2(-torch.randint(0, 17, (places, dim // 32, 1), generator=generator).float())
        values = (values.reshape(places, dim // 32, 32) * apart).reshape(places, dim)
    values[places // 2] = 0.0
    records = index_format(dim, SERVED).encode(values)
    cache = PagedRows(storage, offset, entries, layout, page_split)
    at = torch.arange(places)
    cache.write_bytes(at // entries + 1, at % entries, records)
    table = (torch.randperm(blocks * sequences, generator=generator) + 1).reshape(sequences, blocks).to(torch.int32)
    for sequence in range(sequences):
        longest = max((n for s, n in zip(row_seq, n_vis, strict=True) if s == sequence), default=0)
        table[sequence, -(-longest // entries) :] = -1
    query = cast_q4ue(torch.randn(rows, heads, dim, generator=generator), precision=SERVED)
    weights = torch.randn(rows, heads, generator=generator)
    return IndexRows(
        query.bfloat16().to(DEVICE),
        weights.bfloat16().to(DEVICE),
        PagedRows(storage.to(DEVICE), offset, entries, layout, page_split),
        table.to(DEVICE),
        torch.tensor(row_seq, dtype=torch.int32, device=DEVICE),
        torch.tensor(n_vis, dtype=torch.int64, device=DEVICE),
    )
