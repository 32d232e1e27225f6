# mypy: ignore-errors
"""The CUDA text of the Hopper kernel for one shape, and its TileLang launch."""

import functools
from pathlib import Path

_FOLDER = Path(__file__).parent
# Shared memory that a block can have, without what the kernel takes beside its rings.
_RINGS = 217 * 1024
_UNIT_BYTES = 16384 + 2048
_FEW = 64


def is_narrow(columns: int) -> bool:
    """Whether words go straight to registers."""
    return columns <= _FEW


def stages(columns: int) -> tuple[int, int]:
    """Units of words in flight (none: they do not pass shared memory), and units or, if narrow, blocks of rows."""
    if is_narrow(columns):
        return 0, 6
    return min(8, (_RINGS - 6 * columns * 128) // _UNIT_BYTES), 6


def threads(columns: int) -> int:
    """Threads of a block."""
    return 512 if is_narrow(columns) else 256 + 128


def memory(columns: int, *, gate_up: bool) -> int:
    """Bytes of shared memory."""
    words, rows = stages(columns)
    row_bytes = rows * columns * (512 if is_narrow(columns) else 128)
    staging = 2 * columns * 128 if gate_up else columns * 528
    return words * _UNIT_BYTES + max(row_bytes, staging) + 512 + 16 * columns * 4 + columns * 8


def batch(columns: int) -> int:
    """Steps of 16 of K that a batch of multiplications takes."""
    return 4 if is_narrow(columns) else 2


def source(*, columns: int, rows: int, blocks: int, gate_up: bool) -> str:
    """CUDA text with the sizes of `hopper.cuh` in front."""
    words, units = stages(columns)
    sizes = {
        "BN": columns,
        "ROWS": rows,
        "BLOCKS": blocks,
        "GATE_UP": int(gate_up),
        "W_UNITS": words,
        "X_UNITS": units,
        "BATCH": batch(columns),
    }
    files = "hopper.cuh", f"hopper_{'narrow' if is_narrow(columns) else 'wide'}.cuh", "hopper_epilogue.cuh"
    defines = "\n".join(f"#define {name} {value}" for name, value in sizes.items())
    # The names end here: TileLang puts its own headers behind this text.
    ends = "\n".join(f"#undef {name}" for name in sizes)
    return "\n".join((defines, _wgmma(columns), *(_FOLDER.joinpath(name).read_text() for name in files), ends, ""))


def _wgmma(columns: int) -> str:
    """d [64, columns] += a [64, 16] . b [16, columns]: a in registers, b in shared memory."""
    count = columns // 2
    results = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
__device__ __forceinline__ void wgmma(float* d, const unsigned int* a, unsigned long long b) {{
  asm volatile(
      "{{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
      "{{{results}}}, {{{operands}}}, %{count + 4}, p, 1, 1, 0;}}"
      : {outputs} : {inputs}, "l"(b));
}}"""


@functools.cache
def compiled(*, columns: int, rows: int, blocks: int, gate_up: bool):
    """The kernel of one shape; it is compiled on first use.

    It takes x (tiled rows), words, scales, the shared expert's words and scales, starts, slot_pair, slot_weight, out
    (tiled rows for gate_up, else rows), limit, groups (of 8 slots in x, and in out for gate_up), the number of experts
    (which is the index of the shared one), the range of experts to run, whether the next grid is to start late, and a
    bound on the row tiles.
    """
    import tilelang
    import tilelang.language as T
    from tvm.target import Target

    text = source(columns=columns, rows=rows, blocks=blocks, gate_up=gate_up)
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        sizes = [T.dynamic(f"size_{i}") for i in range(9)]

        @T.prim_func
        def hopper_experts(
            x: T.Tensor((sizes[0],), T.bfloat16),
            words: T.Tensor((sizes[1],), T.int32),
            scales: T.Tensor((sizes[2],), T.uint8),
            shared_words: T.Tensor((sizes[3],), T.int32),
            shared_scales: T.Tensor((sizes[4],), T.uint8),
            starts: T.Tensor((sizes[5],), T.int32),
            slot_pair: T.Tensor((sizes[6],), T.int32),
            slot_weight: T.Tensor((sizes[7],), T.float32),
            out: T.Tensor((sizes[8],), T.bfloat16),
            limit: T.float32,
            groups: T.int32,
            experts: T.int32,
            first: T.int32,
            last: T.int32,
            late: T.int32,
            tiles: T.int32,
        ):
            with T.Kernel(rows // 256, tiles, threads=threads(columns), prelude=text):
                memory_bytes = T.alloc_shared((memory(columns, gate_up=gate_up),), T.uint8, scope="shared.dyn")
                T.call_extern(
                    "handle",
                    "expert_product",
                    T.access_ptr(x, "r"),
                    T.access_ptr(words, "r"),
                    T.access_ptr(scales, "r"),
                    T.access_ptr(shared_words, "r"),
                    T.access_ptr(shared_scales, "r"),
                    T.access_ptr(starts, "r"),
                    T.access_ptr(slot_pair, "r"),
                    T.access_ptr(slot_weight, "r"),
                    T.access_ptr(out, "w"),
                    limit,
                    groups,
                    experts,
                    first,
                    last,
                    late,
                    T.access_ptr(memory_bytes, "rw"),
                )
                # This is what makes TileLang launch the grid before the one ahead has ended; the body waits itself.
                T.pdl_sync()

        return tilelang.compile(hopper_experts, out_idx=None, target=target)
