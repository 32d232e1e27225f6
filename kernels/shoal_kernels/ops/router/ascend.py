# mypy: ignore-errors
"""Choice of experts on Ascend. Lowered, never run here."""

import torch
from torch import Tensor

from shoal_kernels import ascend_host

_THREADS = 128


def route_kernel(*, experts: int, k: int):
    """ids int32 [rows, k] and weights float32 [rows, k] from logits L and bias B float32 [rows, experts].

    The largest score + bias first, ties to the smaller id; each round takes the best that is left. The weights' sum is
    sequential, so it may differ from the host's tree in the last bit.
    """
    import tilelang.ascend.language as T

    from shoal_kernels import ascend_lib as lib

    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        L: T.Tensor((rows, experts), "float32"),
        B: T.Tensor((rows, experts), "float32"),
        ids: T.Tensor((rows, k), "int32"),
        weights: T.Tensor((rows, k), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(lib.VECTOR_CORES) as core:
            logits = T.alloc_shared((1, experts), "float32")
            bias = T.alloc_shared((1, experts), "float32")
            score = T.alloc_shared((1, experts), "float32")
            chosen = T.alloc_shared((1, 8 * ((k + 7) // 8)), "int32")
            gate = T.alloc_shared((1, 8 * ((k + 7) // 8)), "float32")
            for turn in T.serial(T.ceildiv(rows - core, lib.VECTOR_CORES)):
                row = turn * lib.VECTOR_CORES + core
                T.copy(L[row : row + 1, :], logits)
                T.copy(B[row : row + 1, :], bias)
                with T.SimtVF(threads=_THREADS):
                    left = T.alloc_fragment((1, experts), "float32")
                    tied = T.alloc_fragment((1, experts), "int32")
                    best = T.alloc_fragment((1,), "float32")
                    winner = T.alloc_fragment((1,), "int32")
                    for r, e in T.Parallel(1, experts):
                        x = logits[r, e]
                        softplus = T.max(x, lib.f32(0.0)) + T.log1p(T.exp(-T.abs(x)))
                        score[r, e] = T.sqrt(softplus)
                        left[r, e] = T.sqrt(softplus) + bias[r, e]
                    for place in T.serial(k):
                        T.reduce_max(left, best, dim=1)
                        for r, e in T.Parallel(1, experts):
                            tied[r, e] = T.if_then_else(left[r, e] == best[r], e, experts)
                        T.reduce_min(tied, winner, dim=1)
                        for r, e in T.Parallel(1, experts):
                            left[r, e] = T.if_then_else(e == winner[r], -T.infinity("float32"), left[r, e])
                        for r in T.Parallel(1):
                            chosen[r, place] = winner[r]
                with T.SimtVF(threads=32):
                    total = T.alloc_var("float32")
                    for r in T.Parallel(1):
                        total = lib.f32(0.0)
                        for place in T.serial(k):
                            total = total + score[r, chosen[r, place]]
                        for place in T.serial(k):
                            gate[r, place] = score[r, chosen[r, place]] / (total + lib.f32(1e-20)) * scale
                T.copy(chosen[:, 0:k], ids[row : row + 1, :])
                T.copy(gate[:, 0:k], weights[row : row + 1, :])

    return main


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits, bias [R, E] -> ids int32 [R, k], weights [R, k]."""
    rows, experts = logits.shape
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ascend_host.run(route_kernel, (logits, bias.contiguous(), ids, weights, scale), experts=experts, k=k)
    return ids, weights
