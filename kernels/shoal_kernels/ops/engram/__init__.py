"""Engram: rows of a hashed n-gram table, gated into the residual streams."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_kernels.checks import check_index, check_rows, check_values
from shoal_kernels.precision import Precision
from shoal_kernels.registry import resolve

MAX_LOOKBACK = 4


@dataclass(frozen=True, slots=True)
class EngramTable:
    """One layer's table, usually a view of mapped memory that is never read whole.

    data    uint8 [rows, head_dim], e4m3 bytes
    scales  uint8 [rows, head_dim / 32], ue8m0 bytes
    """

    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        check_rows("data", self.data, None, None, dtype=torch.uint8)
        rows, head_dim = self.data.shape
        if head_dim % 32:
            raise ValueError(f"head_dim must be a multiple of 32, got {head_dim}")
        check_rows("scales", self.scales, rows, head_dim // 32, dtype=torch.uint8)


def hash_rows(
    lookback: Tensor, is_image: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_id: int
) -> Tensor:
    """Table rows of each token's 2-, 3- and 4-grams.

    lookback     int64 [R, 4]: compressed ids t_0 (the token itself), t_1, t_2, t_3; pad_id before the sequence start
    is_image     bool [R, 4] for the same places; an image token turns itself and every older place into pad_id
    multipliers  int64 [4] odd; primes, offsets  int64 [3 * heads], n-gram size major
    returns      int64 [R, 3 * heads]; -1 in every column where the token itself is an image token
    raises       ValueError for shape or dtype
    exact        integer arithmetic
    source       specification of the model, section 6.3
    """
    rows = lookback.shape[0]
    check_rows("lookback", lookback, rows, MAX_LOOKBACK, dtype=torch.int64)
    check_rows("is_image", is_image, rows, MAX_LOOKBACK, dtype=torch.bool)
    check_rows("multipliers", multipliers, MAX_LOOKBACK, dtype=torch.int64)
    columns = primes.shape[0]
    check_rows("primes", primes, columns, dtype=torch.int64)
    check_rows("offsets", offsets, columns, dtype=torch.int64)
    if columns % (MAX_LOOKBACK - 1):
        raise ValueError(f"primes must hold {MAX_LOOKBACK - 1} n-gram sizes, got {columns}")
    heads = columns // (MAX_LOOKBACK - 1)
    hidden = is_image.to(torch.int64).cumsum(1) > 0
    terms = torch.where(hidden, pad_id, lookback) * multipliers
    parts = []
    roll = terms[:, 0]
    for s in range(1, MAX_LOOKBACK):
        roll = roll ^ terms[:, s]
        part = slice((s - 1) * heads, s * heads)
        parts.append(roll[:, None] % primes[part] + offsets[part])
    return torch.where(is_image[:, :1], -1, torch.cat(parts, dim=1))


def gather(table: EngramTable, rows: Tensor, *, precision: Precision, backend: str | None = None) -> Tensor:
    """Dequantised table rows side by side; the input of the wkv linear, to be used with cast=False (it is Q8 already).

    rows     int64 [R, columns]; -1 gives zeros
    returns  [R, columns * head_dim] in the precision's dtype
    raises   ValueError for shape, dtype or a row outside the table
    exact    all implementations agree bit for bit
    source   specification of the model, section 6.4
    """
    check_rows("rows", rows, None, None, dtype=torch.int64)
    check_index("rows", rows, -1, table.data.shape[0])
    result: Tensor = resolve("engram_gather", rows.device.type, precision, backend)(table, rows, precision)
    return result


@dataclass(frozen=True, slots=True)
class Fetched:
    """Table rows on their way to a device. Build it with `prefetch`, take it once with `take`.

    On the host nothing travels: then it holds the table and the row numbers.
    """

    table: EngramTable
    rows: Tensor
    data: Tensor | None = None  # uint8 [R * columns, head_dim] on the device
    scales: Tensor | None = None  # uint8 [R * columns, head_dim / 32] on the device
    arrival: torch.cuda.Event | None = None


def prefetch(table: EngramTable, rows: Tensor, device: torch.device | str) -> Fetched:
    """Start to bring table rows to a device, so that they are there when their layer asks; rows follow from token ids.

    The table stays in host memory, usually mapped. The wanted bytes alone are gathered into page-locked memory and
    copied by a stream of their own.

    rows     int64 [R, columns] in host memory; -1 gives zeros
    device   where they go; "cpu" keeps them for `take`
    raises   ValueError for shape, dtype or a row outside the table
    """
    check_rows("rows", rows, None, None, dtype=torch.int64)
    check_index("rows", rows, -1, table.data.shape[0])
    target = torch.device(device)
    if target.type == "cpu":
        return Fetched(table, rows)
    if rows.device.type != "cpu":
        raise ValueError("rows must be in host memory")
    flat = rows.flatten()
    staged = [gathered_bytes(part, flat, is_pinned=True) for part in (table.data, table.scales)]
    stream = _copy_stream(target)
    with torch.cuda.stream(stream):
        data, scales = (part.to(target, non_blocking=True) for part in staged)
        arrival = torch.cuda.Event()
        arrival.record(stream)
    return Fetched(table, rows, data, scales, arrival)


def gathered_bytes(part: Tensor, rows: Tensor, *, is_pinned: bool = False) -> Tensor:
    """Rows of a table's bytes, uint8 [n, units]; zeros, which stand for zeros, where `rows` int64 [n] is -1."""
    out = torch.empty(rows.shape[0], part.shape[1], dtype=torch.uint8, device=part.device, pin_memory=is_pinned)
    torch.index_select(part, 0, rows.clamp_min(0), out=out)
    out[rows < 0] = 0
    return out


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def take(fetched: Fetched, *, precision: Precision, backend: str | None = None) -> Tensor:
    """Values of prefetched rows: what `gather` gives for them. The stream, not the host, waits for their arrival.

    returns  [R, columns * head_dim] in the precision's dtype
    """
    data, scales, arrival = fetched.data, fetched.scales, fetched.arrival
    if data is None or scales is None or arrival is None:
        return gather(fetched.table, fetched.rows, precision=precision, backend=backend)
    stream = torch.cuda.current_stream(data.device)
    stream.wait_event(arrival)
    # The allocator must not hand their memory to the copying stream while this one still reads.
    data.record_stream(stream)
    scales.record_stream(stream)
    arrived = EngramTable(data, scales)
    rows = torch.arange(data.shape[0], device=data.device).view(fetched.rows.shape)
    return gather(arrived, rows, precision=precision, backend=backend)


def gate(
    streams: Tensor,
    kv: Tensor,
    weight: Tensor,
    skip: Tensor,
    *,
    rms_eps: float = 1e-20,
    precision: Precision,
    backend: str | None = None,
) -> Tensor:
    """Add the looked-up value to every stream, through a gate per stream.

    streams  [R, N, D] in the precision's dtype
    kv       [R, (N+1) * D]: a key per stream, then the value
    weight   float32 [N, D] = q_weight * k_weight (`gate_weight`)
    skip     bool [R]: image tokens, whose streams stay as they are
    returns  [R, N, D], a new tensor
    raises   ValueError for shape or dtype
    exact    all implementations agree bit for bit
    source   specification of the model, section 6.4; sign(0) = 0
    """
    check_values("streams", streams, None, None, None, precision=precision)
    rows, n, d = streams.shape
    check_values("kv", kv, rows, (n + 1) * d, precision=precision)
    check_rows("weight", weight, n, d, dtype=torch.float32)
    check_rows("skip", skip, rows, dtype=torch.bool)
    result: Tensor = resolve("engram_gate", streams.device.type, precision, backend)(
        streams, kv, weight, skip, rms_eps, precision
    )
    return result


def gate_weight(q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """The fused weight of `gate`: q_weight * k_weight, bfloat16 [N, D] each -> float32 [N, D]."""
    return q_weight.to(torch.float32) * k_weight.to(torch.float32)
