# mypy: ignore-errors
"""The candidate blocks of groups of rows, united in a CUDA function; other sizes go to the Triton kernel."""

from __future__ import annotations

import functools

import torch

from shoal_kernels.ops.indexer import row_groups
from shoal_kernels.ops.indexer.pick_tilelang import arch_of
from shoal_kernels.ops.indexer.unite_source import unite_source

_THREADS = 512
_WORDS = (512, 4096)


@functools.cache
def kernel(words: int, arch: str):
    """Compiled for up to 32 * words blocks."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = build(words)
    return tilelang.compile(program, target=target)


def build(words: int):
    """One block for each row; those of rows that start no group end at once."""
    import tilelang.language as T

    rows, listed = T.dynamic("rows, listed")
    size = 2 * words + 32

    @T.prim_func
    def unite_rows(
        candidates: T.Tensor((rows, listed), "int32"),
        row_seq: T.Tensor((rows,), "int32"),
        n_vis: T.Tensor((rows,), "int64"),
        blocks: T.Tensor((rows, listed), "int32"),
        places: T.Tensor((rows, listed, 8), "int16"),
        lengths: T.Tensor((rows,), "int32"),
        stops: T.Tensor((rows,), "int32"),
        bound: T.int32,
    ):
        with T.Kernel(rows, threads=_THREADS) as row:
            T.import_source(unite_source(words))
            shared = T.alloc_shared([size], "int32")
            T.call_extern(
                "handle",
                f"shoal_unite_{words}",
                T.access_ptr(candidates[0, 0], "r", rows * listed),
                T.access_ptr(row_seq[0], "r", rows),
                T.access_ptr(n_vis[0], "r", rows),
                row,
                rows,
                listed,
                bound,
                T.access_ptr(blocks[0, 0], "w", rows * listed),
                T.access_ptr(places[0, 0, 0], "w", rows * listed * 8),
                T.access_ptr(lengths[0], "w", rows),
                T.access_ptr(stops[0], "w", rows),
                T.access_ptr(shared[0], "rw", size),
            )

    return unite_rows


def unite_candidates(
    candidates: torch.Tensor, size: int, row_seq: torch.Tensor, n_vis: torch.Tensor, bound: int
) -> row_groups.UnitedCandidates:
    """As `row_groups.unite_candidates`."""
    words = next((words for words in _WORDS if bound <= words * 32 * 8), None)
    if size != 8 or words is None or candidates.shape[1] >= 1 << 15:
        return row_groups.unite_candidates(candidates, size, row_seq, n_vis, bound)
    united = row_groups.UnitedCandidates.empty(candidates)
    memory = united.blocks, united.places, united.lengths, united.stops
    kernel(words, arch_of(candidates.device))(candidates, row_seq, n_vis, *memory, bound)
    return united
