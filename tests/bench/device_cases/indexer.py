"""Index scores with top-k over 131,072-token contexts: the candidate source, ratio 2, candidates only, a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16, PagedRows, formats, index_format
from shoal_kernels.ops import indexer
from torch import Tensor

_HEADS, _DIM, _TOPK, _CANDIDATES, _SIZE = 32, 128, 512, 2048, 8
_CONTEXT, _BLOCK, _VERIFY = 131_072, 128, 6
_RECORD = _DIM // 2 + _DIM // 32
_COLD_BYTES = 200 << 20


class _Batch:
    """Requests with their own keys in shuffled blocks, and `rows` rows each at the end of the context."""

    def __init__(self, requests: int, ratio: int, rows: int = _VERIFY) -> None:
        generator = torch.Generator("cuda").manual_seed(requests * 10 + ratio)

        def random_bytes(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

        per_block, blocks = _BLOCK // ratio, _CONTEXT // _BLOCK
        self.entries = per_block * blocks
        storage = random_bytes(0, 256, 1 + requests * blocks, per_block * _RECORD)
        storage[:, per_block * _DIM // 2 :] = random_bytes(122, 129, 1 + requests * blocks, per_block * _DIM // 32)
        self.keys = PagedRows(storage, 0, per_block, index_format(_DIM, SERVED_BF16), page_split=True)
        order = torch.randperm(requests * blocks, device="cuda", generator=generator)
        self.table = (order + 1).reshape(requests, blocks).to(torch.int32)
        count = requests * rows
        self.row_seq = torch.arange(requests, device="cuda").repeat_interleave(rows).to(torch.int32)
        positions = _CONTEXT - rows + torch.arange(rows, device="cuda").repeat(requests)
        self.n_vis = (positions + 1) // ratio
        query = torch.randn(count, _HEADS, _DIM, device="cuda", generator=generator)
        data, scales = formats.encode_q4ue(query)
        self.query = formats.decode_q4ue(data, scales).bfloat16()
        self.weights = torch.randn(count, _HEADS, device="cuda", generator=generator).bfloat16()
        self.seen = int(self.n_vis.sum())
        self.requests = requests

    @property
    def arguments(self) -> tuple[Tensor, Tensor, PagedRows, Tensor, Tensor, Tensor]:
        return self.query, self.weights, self.keys, self.table, self.row_seq, self.n_vis

    def select(self) -> object:
        return indexer.select(*self.arguments, _TOPK, precision=SERVED_BF16)

    def select_with_candidates(self) -> object:
        return indexer.select_with_candidates(*self.arguments, _TOPK, _CANDIDATES, _SIZE, precision=SERVED_BF16)

    def bytes(self, keys: int, *, outputs: int) -> int:
        """Keys once, and rows: query, weights, outputs."""
        return keys * _RECORD + self.query.shape[0] * (_HEADS * (_DIM + 1) * 2 + outputs * 4)


def _flops(scores: int) -> int:
    return 2 * _HEADS * _DIM * scores


def _sets(requests: int, ratio: int) -> list[_Batch]:
    size = requests * _CONTEXT // ratio * _RECORD
    return [_Batch(requests, ratio) for _ in range(max(1, -(-_COLD_BYTES // size)))]


def _candidates(batch: _Batch) -> tuple[Callable[[], object], int]:
    """Choice inside candidate blocks that the rows of a request mostly share; the keys that must be read."""
    blocks = batch.entries // _SIZE
    common = torch.rand(batch.requests, 1, blocks, device="cuda")
    own = torch.rand(batch.requests, _VERIFY, blocks, device="cuda")
    best = (common + 0.1 * own).reshape(-1, blocks).topk(_CANDIDATES, dim=1).indices
    chosen = best.sort(dim=1).values.to(torch.int32)
    union = torch.zeros(batch.requests, blocks, dtype=torch.bool, device="cuda")
    union.scatter_(1, chosen.reshape(batch.requests, -1).long(), True)

    def run() -> object:
        return indexer.select(
            *batch.arguments, _TOPK, candidates=chosen, candidate_block_size=_SIZE, precision=SERVED_BF16
        )

    return run, int(union.sum()) * _SIZE


def cases() -> Iterator[Case]:
    """Decode steps of 256, 60 and 8 requests, then a prefill chunk."""
    for requests in (256, 60, 8):
        words = f"{requests} requests x {_VERIFY} rows, 131,072 positions"
        sets = _sets(requests, 1)
        first = sets[0]
        yield Case(
            kernel="indexer, top-512 and 2,048 candidate blocks, ratio 1",
            workload=words,
            runs=[batch.select_with_candidates for batch in sets],
            bytes=first.bytes(requests * first.entries, outputs=_TOPK + _CANDIDATES),
            flops=_flops(first.seen),
            scaled=True,
            target=0.5,
        )
        inside = [_candidates(batch) for batch in sets]
        yield Case(
            kernel="indexer, top-512 of 2,048 candidate blocks",
            workload=words,
            runs=[run for run, _ in inside],
            bytes=first.bytes(inside[0][1], outputs=_TOPK + _CANDIDATES),
            flops=_flops(requests * _VERIFY * _CANDIDATES * _SIZE),
            scaled=True,
            target=0.5,
        )
        del sets, inside, first
        if requests < 256:
            continue
        half = _Batch(requests, 2)
        yield Case(
            kernel="indexer, top-512, ratio 2",
            workload=words,
            runs=[half.select],
            bytes=half.bytes(requests * half.entries, outputs=_TOPK),
            flops=_flops(half.seen),
            scaled=True,
            target=0.5,
        )
        del half
    chunk = _Batch(1, 1, rows=2048)
    yield Case(
        kernel="indexer, top-512, ratio 1",
        workload="a chunk of 2,048 rows of one sequence, 131,072 positions",
        runs=[chunk.select],
        bytes=chunk.bytes(chunk.entries, outputs=_TOPK),
        flops=_flops(chunk.seen),
        scaled=True,
        target=0.5,
    )
