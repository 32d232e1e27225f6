# mypy: ignore-errors
"""The CUDA text of the Hopper kernel and its TileLang launch."""

import functools
from pathlib import Path

from shoal_kernels.ops.sparse_attention.tilelang_parts import DIM, HEADS, TILE
from shoal_kernels.ops.sparse_attention.tilelang_source import FINISH, GATHER, INTRINSICS

_PTX, _GATHER, _BODY = (
    Path(__file__).with_name(name) for name in ("hopper_ptx.cuh", "hopper_gather.cuh", "hopper.cuh")
)
# For one part: queries, two stages of keys, two of weights, barriers and small arrays. Two parts need less.
_MEMORY = HEADS * DIM * 2 + 2 * TILE * DIM * 2 + 2 * HEADS * TILE * 2 + 2048
THREADS = 512


def parts(rows: int, sms: int) -> int:
    """Multiprocessors of a row: two where every row gets them. The bits are the same."""
    return 2 if 2 * rows <= sms else 1


def source(frequencies: int, has_entries: bool, cast_out: bool, parts: int) -> str:
    """CUDA text of `shoal_attend`."""
    products = _wgmma("wgmma_scores", 64, "int more", 0) + _wgmma("wgmma_sum", 128, "", 1)
    sizes = f"namespace shoal {{\nconstexpr int PARTS = {parts};\n}}\n"
    return INTRINSICS + _PTX.read_text() + products + sizes + body(frequencies, has_entries, cast_out)


def body(frequencies: int, has_entries: bool, cast_out: bool) -> str:
    """The part without PTX; `shoal::PARTS` goes before it."""
    sizes = f"FREQUENCIES = {frequencies}, HAS_ENTRIES = {int(has_entries)}, CAST_OUT = {int(cast_out)}"
    return (
        GATHER + FINISH + f"namespace shoal {{\nconstexpr int {sizes};\n}}\n" + _GATHER.read_text() + _BODY.read_text()
    )


def _wgmma(name: str, columns: int, more: str, transposed: int) -> str:
    """d [64, columns] = a [64, 16] . b [16, columns], plus d unless `more` is there and 0; both in shared memory."""
    count = columns // 2
    results = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    keep = f"%{count + 2}" if more else "1"
    parameters = ", ".join(("float* d", "unsigned long long a", "unsigned long long b", *([more] if more else [])))
    return f"""
__device__ __forceinline__ void {name}({parameters}) {{
  asm volatile(
      "{{.reg .pred p; setp.ne.b32 p, {keep}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
      "{{{results}}}, %{count}, %{count + 1}, p, 1, 1, 0, {transposed};}}"
      : {outputs} : "l"(a), "l"(b){', "r"(more)' if more else ""});
}}
"""


@functools.cache
def kernel(sms: int, frequencies: int, has_entries: bool, cast_out: bool, parts: int, arch: str = "sm_90a"):
    """Compiled for the static sizes; `parts` 2 is for few rows. Call it with the tensors of `build`."""
    import tilelang
    from tvm.target import Target

    target = Target({"kind": "cuda", "arch": arch})
    with target:
        program = build(sms, frequencies, has_entries, cast_out, parts)
    # No fast math: it flushes subnormals, which the smallest scales of entries are.
    return tilelang.compile(program, target=target, compile_flags=["--fmad=false"])


def build(sms: int, frequencies: int, has_entries: bool, cast_out: bool, parts: int):
    """The program over dynamic numbers of rows, records and blocks."""
    import tilelang.language as T

    text = source(frequencies, has_entries, cast_out, parts)
    rows, near_width, far_width = T.dynamic("rows, near_width, far_width")
    records, stored, units, sequences, blocks, positions_known = T.dynamic(
        "records, stored, units, sequences, blocks, positions_known"
    )
    bf16, f32, i32, u8 = "bfloat16", "float32", "int32", "uint8"

    @T.prim_func
    def attend(
        query: T.Tensor((rows, HEADS, DIM), bf16),
        window: T.Tensor((records, DIM + DIM // 32), u8),
        window_index: T.Tensor((rows, near_width), i32),
        sink: T.Tensor((HEADS,), f32),
        positions: T.Tensor((rows,), "int64"),
        cos_sin: T.Tensor((positions_known, 2 * frequencies), f32),
        storage: T.Tensor((stored, units), u8),
        block_table: T.Tensor((sequences, blocks), i32),
        row_seq: T.Tensor((rows,), i32),
        topk: T.Tensor((rows, far_width), i32),
        out: T.Tensor((rows, HEADS, DIM), bf16),
        factor: T.float32,
        per_block: T.int32,
        offset: T.int32,
        stride: T.int32,
    ):
        with T.Kernel(
            sms // parts * parts, threads=THREADS, prelude=text, cluster_dims=(parts, 1, 1) if parts > 1 else None
        ):
            memory = T.alloc_shared((_MEMORY,), u8, scope="shared.dyn")
            if parts > 1:
                # Kernels with a cluster may be launched before the one ahead is done: its rows are read here.
                T.pdl_sync()
            T.call_extern(
                "handle",
                "shoal_attend",
                T.access_ptr(query, "r"),
                T.access_ptr(window, "r"),
                T.access_ptr(window_index, "r"),
                T.access_ptr(sink, "r"),
                T.access_ptr(positions, "r"),
                T.access_ptr(cos_sin, "r"),
                T.access_ptr(storage, "r"),
                T.access_ptr(block_table, "r"),
                T.access_ptr(row_seq, "r"),
                T.access_ptr(topk, "r"),
                T.access_ptr(out, "w"),
                factor,
                rows,
                near_width,
                far_width,
                blocks,
                units,
                per_block,
                offset,
                stride,
                T.access_ptr(memory, "rw"),
            )

    return attend
