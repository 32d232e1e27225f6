"""Every operation on the CPU at the nano size, one thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench.harness import finish
from shoal_kernels import SERVED, PagedRows, index_format, main_format, warm
from shoal_kernels.ops import compressor, engram, hyper_connections, indexer, norm_rope, router, sampling
from shoal_kernels.ops.cast import cast_q4ue
from shoal_kernels.ops.experts import ExpertWeights, moe
from shoal_kernels.ops.linear import LinearWeight, linear
from shoal_kernels.ops.lm_head import lm_head_argmax
from shoal_kernels.ops.sparse_attention import sparse_attention
from shoal_kernels.row_formats import window_format

_DIM, _HEADS, _HEAD_DIM, _EXPERTS, _INNER, _VOCAB = 256, 4, 64, 16, 128, 4096
_CONTEXT, _WINDOW, _TOPK, _INDEX_HEADS = 2048, 128, 64, 4


def run(rows: int = 6, repeats: int = 200) -> list[dict[str, Any]]:
    """Best single call of each operation on `rows` rows: op, rows, microseconds, and GFLOP/s where FLOPs dominate."""
    warm()
    results = []
    for name, operation, flops in _operations(rows):
        operation()
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            operation()
            best = min(best, time.perf_counter() - start)
        result: dict[str, Any] = {"op": name, "rows": rows, "us": round(best * 1e6, 1)}
        if flops:
            result["gflops"] = round(flops / best / 1e9, 1)
        results.append(result)
    return results


def _operations(rows: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    torch.manual_seed(1)
    x, streams = torch.randn(rows, _DIM).bfloat16().float(), torch.randn(rows, 4, _DIM).bfloat16().float()
    for name, size, out, kind in (
        ("linear qkv", _DIM, 192, "bf16"),
        ("linear q", 128, _HEADS * _HEAD_DIM, "bf16"),
        ("linear head", _DIM, _VOCAB, "f32"),
    ):
        weight = LinearWeight(torch.randn(1, size, out), quantised=kind == "bf16")
        part = x[:, :size].contiguous()
        yield (
            name,
            lambda part=part, weight=weight, kind=kind: linear(part, weight, out=kind, precision=SERVED),  # type: ignore[misc]
            2 * rows * size * out,
        )
    gain, positions = torch.randn(_DIM), torch.arange(rows) + _CONTEXT
    table = norm_rope.plain_rope_table(32, 10000.0, 8192)
    yield "rms_norm", lambda: norm_rope.rms_norm(x, gain, 1e-20, precision=SERVED), 0
    query = torch.randn(rows, _HEADS, _HEAD_DIM)
    yield "rope", lambda: norm_rope.rope(query, positions, table, precision=SERVED), 0
    mixing = hyper_connections.MixWeight.prepare(torch.randn(24, 4 * _DIM), torch.randn(3), torch.randn(24))

    def mix() -> tuple[torch.Tensor, ...]:
        return hyper_connections.mix(streams, mixing, iterations=20, eps=1e-6, rms_eps=1e-20, precision=SERVED)

    pre, post, comb = mix()
    yield "mix", mix, 2 * rows * 24 * 4 * _DIM
    yield "collapse_norm", lambda: hyper_connections.collapse_norm(streams, pre, gain, 1e-20, precision=SERVED), 0
    yield "expand", lambda: hyper_connections.expand(x, streams, post, comb, precision=SERVED), 0
    logits, bias = torch.randn(rows, _EXPERTS), torch.randn(_EXPERTS)
    yield "route", lambda: router.route(logits, bias, 2, 1.5, precision=SERVED), 0
    ids, shares = router.route(logits, bias, 2, 1.5, precision=SERVED)
    pool = ExpertWeights(torch.randn(_EXPERTS, _DIM, 2 * _INNER) / 16, torch.randn(_EXPERTS, _INNER, _DIM) / 16)
    shared = ExpertWeights(pool.gate_up[:1], pool.down[:1])
    yield (
        "moe",
        lambda: moe(x, ids, shares, pool, shared, 10.0, precision=SERVED),
        2 * rows * 3 * 3 * _DIM * _INNER,
    )
    rows_table = engram.EngramTable(
        torch.randint(0, 120, (4096, 64), dtype=torch.uint8), torch.full((4096, 2), 127, dtype=torch.uint8)
    )
    hashed = torch.randint(0, 4096, (rows, 12))
    yield "engram gather", lambda: engram.gather(rows_table, hashed, precision=SERVED), 0
    kv, fused, skip = torch.randn(rows, 5 * _DIM), torch.randn(4, _DIM), torch.zeros(rows, dtype=torch.bool)
    yield "engram gate", lambda: engram.gate(streams, kv, fused, skip, precision=SERVED), 0
    pair = torch.randn(2, rows, _HEAD_DIM)
    yield "pool_pairs", lambda: compressor.pool_pairs(pair, pair, precision=SERVED), 0
    yield from _attention_operations(rows, query, positions, table)
    z, seeds = torch.randn(rows, _VOCAB) * 3, torch.arange(rows)
    greedy = torch.zeros(rows, dtype=torch.bool)
    plain, filtered = [sampling.RowSampling()] * rows, [sampling.RowSampling(top_p=0.95, top_k=50)] * rows
    yield "sample", lambda: sampling.coupled_argmax(sampling.process_logits(z, plain), seeds, positions, greedy), 0
    yield "argmax", lambda: sampling.coupled_argmax(z, seeds, positions, ~greedy), 0
    head, one = LinearWeight.from_bf16(torch.randn(_VOCAB, _DIM).bfloat16()), torch.ones(rows)
    hidden = torch.randn(rows, _DIM).bfloat16().float()
    yield (
        "lm head + sample",
        lambda: lm_head_argmax(hidden, head, one, seeds, positions, greedy, precision=SERVED),
        2 * rows * _DIM * _VOCAB,
    )
    yield "filter", lambda: sampling.process_logits(z, filtered), 0


def _attention_operations(
    rows: int, query: torch.Tensor, positions: torch.Tensor, table: norm_rope.RopeTable
) -> Iterator[tuple[str, Callable[[], object], int]]:
    blocks, places = _CONTEXT // 128, torch.arange(_CONTEXT)
    block_table = torch.arange(blocks, dtype=torch.int32)[None]
    row_seq, n_vis = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), _CONTEXT)
    index_rows = index_format(64, SERVED)
    keys = PagedRows(
        torch.zeros(blocks, 128 * index_rows.units, dtype=torch.uint8), 0, 128, index_rows, page_split=True
    )
    keys.write(places // 128, places % 128, torch.randn(_CONTEXT, 64))
    index_query = cast_q4ue(torch.randn(rows, _INDEX_HEADS, 64), precision=SERVED)
    weights = torch.randn(rows, _INDEX_HEADS)
    flops = 2 * rows * _INDEX_HEADS * 64 * _CONTEXT
    yield (
        "indexer select",
        lambda: indexer.select(index_query, weights, keys, block_table, row_seq, n_vis, _TOPK, precision=SERVED),
        flops,
    )
    main_rows = main_format(_HEAD_DIM, SERVED)
    entries = PagedRows(
        torch.zeros(blocks, 128 * main_rows.units, dtype=torch.uint8), 0, 128, main_rows, page_split=False
    )
    entries.write(places // 128, places % 128, torch.randn(_CONTEXT, _HEAD_DIM))
    topk = indexer.select(index_query, weights, keys, block_table, row_seq, n_vis, _TOPK, precision=SERVED)
    near = window_format(_HEAD_DIM, SERVED)
    records = near.encode(torch.randn(_WINDOW + rows, _HEAD_DIM))
    yield "decode window", lambda: near.decode(records), 0
    window = near.decode(records)
    window_index = (torch.arange(rows)[:, None] + torch.arange(_WINDOW)).to(torch.int32)
    sink = torch.randn(_HEADS)
    yield (
        "sparse_attention",
        lambda: sparse_attention(
            query,
            window,
            window_index,
            sink,
            0.125,
            positions,
            table,
            entries=entries,
            block_table=block_table,
            row_seq=row_seq,
            topk=topk,
            precision=SERVED,
        ),
        4 * rows * _HEADS * _HEAD_DIM * (_WINDOW + _TOPK),
    )


def main() -> int:
    """One row, a verify step and a batch; figures only."""
    results = [result for rows in (1, 6, 48) for result in run(rows)]
    for result in results:
        print(f"{result['op']:24} {result['rows']:3} rows {result['us']:9.1f} us {result.get('gflops', '')}")
    return finish("kernels", workload={"rows": [1, 6, 48], "threads": 1}, bars=[], figures={"operations": results})


if __name__ == "__main__":
    sys.exit(main())
