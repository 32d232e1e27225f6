"""The memory-bound passes over rows: casts, norms, rotation, records, compressed entries, router and Engram.

Released sizes, at 256, 60 and 8 requests x 6 rows, and one prefill chunk. A target is set where the floor is well above
what a launch costs. Every set of inputs has its own outputs, so that what is written leaves the cache too.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from bench.device_case import Case
from shoal_kernels import SERVED_BF16
from shoal_kernels.ops import cast, compressor, engram, norm_rope, records, router
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.row_formats import index_format, main_format
from torch import Tensor

_WORKLOADS = (
    ("256 requests x 6 rows", 1536),
    ("60 requests x 6 rows", 360),
    ("8 requests x 6 rows", 48),
    ("prefill, 8,192 rows", 8192),
)
_TARGET, _JUDGED_FROM_BYTES = 0.75, 43_000_000  # 10 us at the copy bandwidth of an H200
_ROTATED_BYTES, _MAX_SETS = 200_000_000, 48
_HIDDEN, _STREAMS, _Q_LORA, _HEAD, _HEADS = 5120, 4, 1280, 512, 64
_INDEX_HEADS, _INDEX_HEAD, _EXPERTS, _TOP = 32, 128, 384, 6
_ROPE, _COLUMNS, _ENGRAM_HEAD = 64, 24, 256
_BLOCK_ENTRIES, _EPS = 128, 1e-20
_WINDOW_RECORD, _MAIN_RECORD, _INDEX_RECORD = 528, 288, 68

Call = Callable[[], object]


def cases() -> Iterator[Case]:
    """All cases, kernel by kernel."""
    kernels: Sequence[Callable[[int], tuple[str, int, Callable[[], Call]]]] = (
        _cast_q8,
        _rms_norm_cast,
        _window_rows,
        _latent_rows,
        _rope,
        _rope_in_place,
        _rope_cast,
        _store_main_pairs,
        _store_main,
        _store_key,
        _copy_rows,
        _route,
        _engram_decode,
        _engram_gate,
    )
    for kernel in kernels:
        for workload, rows in _WORKLOADS:
            name, num_bytes, make = kernel(rows)
            count = max(2, min(_MAX_SETS, math.ceil(_ROTATED_BYTES / num_bytes)))
            yield Case(
                kernel=name,
                workload=workload,
                runs=[_keeping(make()) for _ in range(count)],
                bytes=num_bytes,
                target=_TARGET if num_bytes >= _JUDGED_FROM_BYTES else None,
                peers=_peers(kernel, rows),
            )


def _peers(kernel: object, rows: int) -> Mapping[str, Call]:
    """The same work by the public TileKernels wheel, where it is installed; its inputs stay in the cache."""
    try:
        tile_kernels = importlib.import_module("tile_kernels")
    except ImportError:
        return {}
    if kernel is _engram_gate:
        streams, kv = _values(rows, _STREAMS, _HIDDEN), _values(rows, _STREAMS + 1, _HIDDEN)
        weight = _wide(_STREAMS, _HIDDEN)
        gate = tile_kernels.engram.engram_gate_fwd
        return {"TileKernels": lambda: gate(streams, kv, weight, _EPS, 1e-6, save_for_backward=False)}
    if kernel is _rope_in_place:
        positions, table = _positions(rows)
        angles = table.cos_sin(positions, torch.float32)
        q = _queries(rows)[:, : _HEADS * _HEAD].view(rows, _HEADS, _HEAD)[..., -_ROPE:]
        rotary = tile_kernels.transform.apply_rotary
        return {"TileKernels": lambda: rotary(q, angles, positions=positions, interleaved=True)}
    return {}


def _keeping(call: Call) -> Call:
    kept: list[object] = []

    def run() -> object:
        result = call()
        kept[:] = [result]
        return result

    return run


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def _wide(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def _positions(rows: int) -> tuple[Tensor, norm_rope.RopeTable]:
    table = norm_rope.plain_rope_table(_ROPE, 10000.0, 1 << 17)
    table.cover((1 << 17) - 1, "cuda")
    return torch.randint(0, 1 << 17, (rows,), device="cuda"), table


def _cast_q8(rows: int) -> tuple[str, int, Callable[[], Call]]:
    def make() -> Call:
        x = _values(rows, _HIDDEN)
        return lambda: cast.cast_q8(x, precision=SERVED_BF16)

    return "Q8 cast of rows", rows * _HIDDEN * 4, make


def _latents(rows: int) -> Tensor:
    return _values(rows, _Q_LORA + _HEAD)


def _rms_norm_cast(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weight = _wide(_Q_LORA)

    def make() -> Call:
        x = _latents(rows)[:, :_Q_LORA]
        return lambda: norm_rope.rms_norm_cast(x, weight, _EPS, precision=SERVED_BF16)

    return "query latent: norm + Q8", rows * _Q_LORA * 4 + _Q_LORA * 4, make


def _window_rows(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weight, (positions, table) = _wide(_HEAD), _positions(rows)

    def make() -> Call:
        x = _latents(rows)[:, _Q_LORA:]
        out = torch.empty(rows, _WINDOW_RECORD, dtype=torch.uint8, device="cuda")
        return lambda: norm_rope.window_rows(x, weight, _EPS, positions, table, precision=SERVED_BF16, out=out)

    return "window rows: norm + RoPE + Q8", rows * (_HEAD * 2 + _WINDOW_RECORD + _ROPE * 4 + 8), make


def _latent_rows(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weights, (positions, table) = (_wide(_Q_LORA), _wide(_HEAD)), _positions(rows)

    def make() -> Call:
        both = _latents(rows)
        out = torch.empty(rows, _WINDOW_RECORD, dtype=torch.uint8, device="cuda")
        return lambda: norm_rope.latents(both, *weights, _EPS, positions, table, precision=SERVED_BF16, out=out)

    return "query latent and window rows together", rows * (_Q_LORA * 4 + _HEAD * 2 + _WINDOW_RECORD + 264), make


def _queries(rows: int) -> Tensor:
    return _values(rows, _HEADS * _HEAD + _INDEX_HEADS * _INDEX_HEAD)


def _rope(rows: int) -> tuple[str, int, Callable[[], Call]]:
    positions, table = _positions(rows)

    def make() -> Call:
        q = _queries(rows)[:, : _HEADS * _HEAD].view(rows, _HEADS, _HEAD)
        return lambda: norm_rope.rope(q, positions, table, precision=SERVED_BF16)

    return "queries: RoPE", rows * (_HEADS * _HEAD * 4 + _ROPE * 4 + 8), make


def _rope_in_place(rows: int) -> tuple[str, int, Callable[[], Call]]:
    positions, table = _positions(rows)

    def make() -> Call:
        q = _queries(rows)[:, : _HEADS * _HEAD].view(rows, _HEADS, _HEAD)
        return lambda: norm_rope.rope(q, positions, table, in_place=True, precision=SERVED_BF16)

    return "queries: RoPE in place", rows * (_HEADS * _ROPE * 4 + _ROPE * 4 + 8), make


def _rope_cast(rows: int) -> tuple[str, int, Callable[[], Call]]:
    positions, table = _positions(rows)

    def make() -> Call:
        q = _queries(rows)[:, _HEADS * _HEAD :].view(rows, _INDEX_HEADS, _INDEX_HEAD)
        return lambda: norm_rope.rope_cast(q, positions, table, precision=SERVED_BF16)

    return "index queries: RoPE + Q4ue", rows * (_INDEX_HEADS * _INDEX_HEAD * 4 + _ROPE * 4 + 8), make


def _pages(entries: int, dim: int, *, index: bool) -> tuple[PagedRows, Tensor, Tensor]:
    layout = (index_format if index else main_format)(dim, SERVED_BF16)
    blocks = -(-entries // _BLOCK_ENTRIES)
    storage = torch.zeros(blocks, _BLOCK_ENTRIES * layout.units, dtype=torch.uint8, device="cuda")
    pages = PagedRows(storage, 0, _BLOCK_ENTRIES, layout, index)
    places = torch.randperm(blocks * _BLOCK_ENTRIES, device="cuda")[:entries]
    return pages, places // _BLOCK_ENTRIES, places % _BLOCK_ENTRIES


def _store_main_pairs(rows: int) -> tuple[str, int, Callable[[], Call]]:
    entries, weight = rows // 2, _wide(_HEAD)
    positions, table = _positions(entries)
    ring = _wide(256 * 8, 2, _HEAD)
    # The first member of every pair waits in its ring; of a long chunk both are in the batch.
    waiting, batch = torch.randperm(2048, device="cuda"), 2048 + torch.arange(rows, device="cuda").view(entries, 2).T
    members = torch.stack((waiting[:entries], batch[1])) if entries <= 2048 else batch.contiguous()

    def make() -> Call:
        raw, (pages, blocks, slots) = _wide(rows, 2 * _HEAD + _INDEX_HEADS), _pages(entries, _HEAD, index=False)
        arguments = (raw[:, : 2 * _HEAD], ring, members, weight, _EPS, positions, table, pages, blocks, slots)
        return lambda: compressor.store_main(*arguments, precision=SERVED_BF16)

    each = 2 * 2 * _HEAD * 4 + 2 * _HEAD + _MAIN_RECORD + _ROPE * 4 + 40
    return "compressed entries, ratio 2: pool + norm + RoPE + Q4nv + store", entries * each, make


def _store_main(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weight, (positions, table) = _wide(_HEAD), _positions(rows)
    members = torch.arange(rows, device="cuda")[None]

    def make() -> Call:
        raw, (pages, blocks, slots) = _wide(rows, _HEAD + _INDEX_HEADS), _pages(rows, _HEAD, index=False)
        ring = raw.new_empty(0, 1, _HEAD)
        arguments = (raw[:, :_HEAD], ring, members, weight, _EPS, positions, table, pages, blocks, slots)
        return lambda: compressor.store_main(*arguments, precision=SERVED_BF16)

    each = _HEAD * 4 + 2 * _HEAD + _MAIN_RECORD + _ROPE * 4 + 32
    return "compressed entries, ratio 1: norm + RoPE + Q4nv + store", rows * each, make


def _store_key(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weight, (positions, table) = _wide(_INDEX_HEAD), _positions(rows)

    def make() -> Call:
        x, (pages, blocks, slots) = _values(rows, _INDEX_HEAD), _pages(rows, _INDEX_HEAD, index=True)
        arguments = (x, weight, _EPS, positions, table, pages, blocks, slots)
        return lambda: compressor.store_key(*arguments, precision=SERVED_BF16)

    return "index keys: norm + RoPE + Q4ue + store", rows * (_INDEX_HEAD * 2 + _INDEX_RECORD + _ROPE * 4 + 24), make


def _copy_rows(rows: int) -> tuple[str, int, Callable[[], Call]]:
    targets, sources = torch.randperm(2 * rows, device="cuda")[:rows], torch.arange(rows, device="cuda")

    def make() -> Call:
        ring = torch.randint(0, 255, (3 * rows, _WINDOW_RECORD), device="cuda").to(torch.uint8)
        return lambda: records.copy_rows(ring[: 2 * rows], targets, ring[2 * rows :], sources, precision=SERVED_BF16)

    return "window records into the rings", rows * (2 * _WINDOW_RECORD + 16), make


def _route(rows: int) -> tuple[str, int, Callable[[], Call]]:
    bias = _wide(_EXPERTS)

    def make() -> Call:
        logits = _wide(rows, _EXPERTS)
        return lambda: router.route(logits, bias, _TOP, 2.5, precision=SERVED_BF16)

    return "router", rows * (_EXPERTS * 4 + _TOP * 8), make


def _engram_decode(rows: int) -> tuple[str, int, Callable[[], Call]]:
    numbers = torch.arange(rows * _COLUMNS, device="cuda").view(rows, _COLUMNS)

    def make() -> Call:
        data = torch.randint(0, 126, (rows * _COLUMNS, _ENGRAM_HEAD), device="cuda").to(torch.uint8)
        table = engram.EngramTable(data, torch.randint(120, 130, (rows * _COLUMNS, 8), device="cuda").to(torch.uint8))
        return lambda: engram.gather(table, numbers, precision=SERVED_BF16)

    return "Engram: fetched bytes to values", rows * _COLUMNS * (_ENGRAM_HEAD * 3 + 16), make


def _engram_gate(rows: int) -> tuple[str, int, Callable[[], Call]]:
    weight, skip = _wide(_STREAMS, _HIDDEN), torch.zeros(rows, dtype=torch.bool, device="cuda")

    def make() -> Call:
        streams, kv = _values(rows, _STREAMS, _HIDDEN), _values(rows, (_STREAMS + 1) * _HIDDEN)
        return lambda: engram.gate(streams, kv, weight, skip, precision=SERVED_BF16)

    num_bytes = rows * (3 * _STREAMS + 1) * _HIDDEN * 2 + _STREAMS * _HIDDEN * 4
    return "Engram gate", num_bytes, make
