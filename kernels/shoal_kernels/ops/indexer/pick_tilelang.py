# mypy: ignore-errors
"""The k best of lists of scores in octets, found in a CUDA function; other sizes go to the Triton kernel."""

from __future__ import annotations

import functools

import torch

from shoal_kernels.ops.indexer import pick_triton
from shoal_kernels.ops.indexer.pick_source import pick_source

_THREADS = 512
_SHARED = 2 * 16


@functools.cache
def kernel(source: int, octets: int, arch: str):
    """Compiled for where the scores are and how many octets a thread takes at once."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = build(source, octets)
    return tilelang.compile(program, target=target)


def build(source: int, octets: int):
    """One block for each row."""
    import tilelang.language as T

    rows, width, entries_width, listed, k = T.dynamic("rows, width, entries_width, listed, k")
    name = f"shoal_pick_{source}_{octets}"

    @T.prim_func
    def pick_rows(
        scores: T.Tensor((rows, width), "int16"),
        entries: T.Tensor((rows, entries_width), "int16"),
        blocks: T.Tensor((rows, listed), "int32"),
        n_vis: T.Tensor((rows,), "int64"),
        out: T.Tensor((rows, k), "int32"),
        bound: T.int32,
    ):
        with T.Kernel(rows, threads=_THREADS) as row:
            T.import_source(pick_source(source, octets))
            T.annotate_min_blocks_per_sm(2)
            shared = T.alloc_shared([_SHARED], "int32")
            T.call_extern(
                "handle",
                name,
                T.access_ptr(scores[row, 0], "r", width),
                T.access_ptr(entries[row, 0], "r", entries_width),
                T.access_ptr(blocks[row, 0], "r", listed),
                n_vis[row],
                bound,
                listed,
                k,
                T.access_ptr(out[row, 0], "w", k),
                T.access_ptr(shared[0], "rw", _SHARED),
            )

    return pick_rows


@functools.cache
def arch_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def pick(source, scores, out, n_vis, places, bound, *, size, entries=None, blocks=None):
    """As `pick_triton.pick`."""
    if size != 8 or scores.shape[1] % 8:
        pick_triton.pick(source, scores, out, n_vis, places, bound, size=size, entries=entries, blocks=blocks)
        return
    if out.shape[0] == 0:
        return
    octets = 1 if places <= 8 * _THREADS else 4
    bits = scores.view(torch.int16)
    entry_bits = bits if entries is None else entries.view(torch.int16)
    kernel(source, octets, arch_of(scores.device))(
        bits, entry_bits, out if blocks is None else blocks, n_vis, out, bound
    )
