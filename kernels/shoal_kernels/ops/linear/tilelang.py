# mypy: ignore-errors
"""TileLang linear: `hopper` for SM90, `sm100` for SM100; sizes that they do not take go to the Triton kernel.

The sum over K is cut into the segments of `segments.segment_count` in all three, and the same products are added in the
same order: on one device all give the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal_kernels.ops.linear import hopper, sm100
from shoal_kernels.ops.linear import triton as plain
from shoal_kernels.ops.linear.segments import segment_count
from shoal_kernels.ops.linear.tiles import MOST_DEPTH, MULTIPROCESSORS, TILE_COLUMNS, Plan, choose
from shoal_kernels.precision import Precision

if TYPE_CHECKING:
    from shoal_kernels.ops.linear import LinearWeight


@cache
def compiled(plan: Plan, quantised: bool, wide: bool, segmented: bool, arch: str = "sm_90a"):
    """The compiled kernel of a plan; called with x, weight, scale, out, scratch, tiles, segments."""
    import tilelang
    from tvm.target import Target

    target = {"kind": "cuda", "arch": arch}
    with Target(target):
        program = (hopper if arch == "sm_90a" else sm100).program(plan, quantised, wide, segmented)
    # Barriers are explicit here; what the compiler would add between the roles of the warpgroups would stop them.
    options = {
        "tl.disable_thread_storage_sync": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
    }
    return tilelang.compile(program, target=target, pass_configs=options)


def serves(width: int, groups: int, depth: int) -> bool:
    """Whether the copy engine takes these sizes and groups do not share a tile; else the Triton kernel is used."""
    separate = groups == 1 or (width // groups % TILE_COLUMNS == 0 and depth % 256 == 0)
    return separate and depth % 64 == 0 and depth <= MOST_DEPTH and width % 8 == 0


def linear(x: Tensor, weight: LinearWeight, cast: bool, round_out: bool, precision: Precision) -> Tensor:
    """x bfloat16 [R, groups * K], rows contiguous but not necessarily next to each other -> [R, groups * N]."""
    rows, width, depth = x.shape[0], weight.out_features, weight.depth
    if not serves(width, weight.groups, depth) or rows == 0:
        return plain.linear(x, weight, cast, round_out, precision)
    if rows == 1 and x.stride(1) == 1:
        x = x.as_strided(x.shape, (x.shape[1], 1))  # one row may have any stride; the copy engine takes some
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    if cast:
        x = plain.cast_rows(x)
    plan = choose(rows, width, depth, segment_count(width, depth), weight.scale is not None)
    return run(plan, x, weight, torch.bfloat16 if round_out else torch.float32)


def run(plan: Plan, x: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The product of a cast input [R, groups * K] by the tiles of `plan`; the bits are those of any other plan."""
    rows, width, depth, quantised = x.shape[0], weight.out_features, weight.depth, weight.scale is not None
    segments = segment_count(width, depth)
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scale = weight.scale if quantised else weight.data.view(torch.uint8)
    kernel = compiled(plan, quantised, dtype == torch.float32, segments > 1, _architecture(x.device.index))
    tiles = -(-width // weight.groups // TILE_COLUMNS)
    parked = plan.rows * TILE_COLUMNS * MULTIPROCESSORS if plan.parked and segments > plan.split else 1
    scratch = torch.empty(parked, dtype=torch.float32, device=x.device)
    kernel(x, weight.data, scale, out, scratch, tiles, segments)
    return out


@cache
def _architecture(device: int) -> str:
    return "sm_100a" if torch.cuda.get_device_capability(device)[0] == 10 else "sm_90a"
