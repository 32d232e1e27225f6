"""Attention over 128 window records and 512 selected FP4 records of contexts of 131,072 positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16, PagedRows, main_format
from shoal_kernels.ops.norm_rope import RopeTable, plain_rope_table
from shoal_kernels.ops.sparse_attention import sparse_attention
from torch import Tensor

HEADS, DIM, WINDOW, TOPK = 64, 512, 128, 512
CONTEXT, BLOCK_ENTRIES, WIDTH = 131_072, 128, 6
_WINDOW_UNITS, _ENTRY_UNITS = 528, 288
# Cached contexts: entries of a row lie anywhere in 1.2 GB, so that gathers miss the L2 cache as they do when serving.
_CONTEXTS = 32
_SETS = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of one step. `width` rows of a request share one context and neighbouring windows."""

    rows: int
    width: int
    window: int = WINDOW
    topk: int = TOPK

    @property
    def flops(self) -> int:
        """Of both products over full lists."""
        return 4 * self.rows * (self.window + self.topk) * HEADS * DIM

    @property
    def bytes(self) -> int:
        """Queries, outputs and selected entries of every row, window records of every request, index lists."""
        requests = -(-self.rows // self.width)
        window = requests * (self.window + self.width - 1) * _WINDOW_UNITS
        per_row = 2 * HEADS * DIM * 2 + self.topk * _ENTRY_UNITS + 4 * (self.window + self.topk)
        return window + self.rows * per_row


class Cache:
    """Random records, sensible as numbers, on the device: a window of 2^20 rows and `_CONTEXTS` paged contexts."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(7)
        blocks = CONTEXT // BLOCK_ENTRIES
        layout = main_format(DIM, SERVED_BF16)
        storage = self._bytes(256, _CONTEXTS * blocks, BLOCK_ENTRIES, _ENTRY_UNITS)
        storage[..., DIM // 2 :] = storage[..., DIM // 2 :] % 16 + 0x20  # scales of 0.125 .. 0.5
        flat = storage.reshape(_CONTEXTS * blocks, -1)
        self.entries = PagedRows(flat, 0, BLOCK_ENTRIES, layout, page_split=False)
        order = torch.randperm(_CONTEXTS * blocks, generator=self.generator, device=device)
        self.block_table = order.reshape(_CONTEXTS, blocks).to(torch.int32)
        self.window = self._bytes(256, 1 << 18, _WINDOW_UNITS)
        self.window[:, :DIM] = (self.window[:, :DIM] & 0x80) | (self.window[:, :DIM] % 0x40)
        self.window[:, DIM:] = 127
        self.table: RopeTable = plain_rope_table(64, 10000.0, CONTEXT)
        self.table.cover(CONTEXT - 1, device)
        self.sink = torch.randn(HEADS, generator=self.generator, device=device)

    def _bytes(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(0, stop, shape, dtype=torch.uint8, generator=self.generator, device=self.device)

    def run(self, work: Workload, **more: object) -> Callable[[], Tensor]:
        """One call over fresh queries and lists."""
        rows, generator, device = work.rows, self.generator, self.device
        query = torch.randn(rows, HEADS, DIM, generator=generator, device=device).to(torch.bfloat16)
        request = torch.arange(rows, device=device) // work.width
        first = (request * 977) % (self.window.shape[0] - 2 * WINDOW - rows)
        start = first + torch.arange(rows, device=device) % work.width
        near = (start[:, None] + torch.arange(work.window, device=device)).to(torch.int32)
        positions = CONTEXT - 1 - torch.arange(rows, device=device) % work.width
        lists: dict[str, object] = {}
        if work.topk:
            spread = CONTEXT // work.topk
            offset = torch.randint(0, spread, (rows, work.topk), generator=generator, device=device)
            far = (torch.arange(work.topk, device=device) * spread + offset).to(torch.int32)
            sequence = (request % _CONTEXTS).to(torch.int32)
            lists = {"entries": self.entries, "block_table": self.block_table, "row_seq": sequence, "topk": far}

        def call() -> Tensor:
            return sparse_attention(
                query,
                self.window,
                near,
                self.sink,
                DIM**-0.5,
                positions,
                self.table,
                cast_out=True,
                precision=SERVED_BF16,
                **lists,  # type: ignore[arg-type]
                **more,  # type: ignore[arg-type]
            )

        return call


def cases() -> Iterator[Case]:
    """Decode and verify steps, prefill chunks, draft blocks and window-only layers."""
    cache = Cache("cuda")
    for requests in (256, 60, 8):
        yield _case(cache, "decode", f"{requests} requests x {WIDTH} rows", Workload(requests * WIDTH, WIDTH), 0.55)
    for rows in (4096, 8192):
        yield _case(cache, "prefill", f"{rows} rows", Workload(rows, rows), 0.55)
    drafts = Workload(256 * 5, 5, window=WINDOW + 5, topk=0)
    yield _case(cache, "draft block", "256 requests x 5 rows", drafts, None)
    yield _case(cache, "window layer", "256 requests x 6 rows", Workload(256 * WIDTH, WIDTH, topk=0), None)


def _case(cache: Cache, kind: str, shape: str, work: Workload, target: float | None) -> Case:
    context = f", {CONTEXT:,} positions" if work.topk else f", {work.window} window rows"
    return Case(
        kernel=f"sparse attention, {kind}",
        workload=shape + context,
        runs=[cache.run(work) for _ in range(_SETS)],
        bytes=work.bytes,
        flops=work.flops,
        target=target,
    )
