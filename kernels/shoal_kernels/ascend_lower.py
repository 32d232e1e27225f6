"""Lowers the Ascend kernels to AscendC source: `python -m shoal_kernels.ascend_lower --write DIRECTORY`.

Compiling the source needs the vendor's CANN; lowering needs TileLang alone. The sources of the decode path at the
released sizes are kept beside the tests, so that a change of a kernel or of TileLang shows.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class AscendKernel:
    """One kernel: the function that builds it, as "op.function", and the static sizes to build it at."""

    builder: str
    sizes: Mapping[str, Any]

    def build(self) -> Any:
        """The TileLang function. Raises ImportError without TileLang, ValueError for sizes it cannot do."""
        op, _, function = self.builder.partition(".")
        return getattr(importlib.import_module(f"shoal_kernels.ops.{op}.ascend"), function)(**self.sizes)


KERNELS: dict[str, AscendKernel] = {
    "cast_q8": AscendKernel("cast.cast_q8", {"d": 5120}),
    "cast_q4ue": AscendKernel("cast.cast_q4ue", {"d": 128}),
    "linear_fp8": AscendKernel("linear.fp8_linear", {"k": 5120, "n": 1792}),
    "linear_fp8_grouped": AscendKernel("linear.fp8_linear", {"k": 4096, "n": 8192, "groups": 8}),
    "linear_bf16": AscendKernel("linear.bf16_linear", {"k": 5120, "n": 384, "out": "float32"}),
    "rms_norm": AscendKernel("norm_rope.rms_norm_kernel", {"d": 5120}),
    "rms_norm_cast": AscendKernel("norm_rope.rms_norm_cast_kernel", {"d": 1280}),
    "rms_norm_rope": AscendKernel("norm_rope.rms_norm_rope_kernel", {"d": 512, "rope": 64}),
    "mix_partials": AscendKernel("hyper_connections.mix_partials", {"d": 5120}),
    "mix_finish": AscendKernel("hyper_connections.mix_finish", {"d": 5120}),
    "expand_norm": AscendKernel("hyper_connections.expand_norm", {"d": 5120}),
    "route": AscendKernel("router.route_kernel", {"experts": 384, "k": 6}),
    "experts_gather": AscendKernel("experts.gather_rows", {"d": 5120}),
    "experts_gate_up": AscendKernel("experts.grouped_linear", {"experts": 384, "k": 5120, "n": 4608}),
    "experts_swiglu": AscendKernel("experts.swiglu_cast", {"inner": 2304}),
    "experts_down": AscendKernel("experts.grouped_linear", {"experts": 384, "k": 2304, "n": 5120}),
    "experts_combine": AscendKernel("experts.combine", {"d": 5120, "k": 6}),
    "indexer_scores": AscendKernel("indexer.indexer_scores", {"heads": 32, "d": 128, "page": 128}),
    "sparse_attention": AscendKernel(
        "sparse_attention.sparse_attention",
        {"heads": 64, "d": 512, "window": 128, "top_k": 512, "rope": 64, "page": 64},
    ),
    "head_argmax": AscendKernel("sampling.head_argmax", {"d": 5120, "vocabulary": 129280}),
    "merge_argmax": AscendKernel("sampling.merge_argmax", {"tiles": 505}),
}
"""The decode path at released sizes, by the name of its golden source."""


def lower(kernel: AscendKernel) -> str:
    """AscendC source of a kernel, without trailing blanks, ending in one newline."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")
    import tilelang
    from tilelang.engine.lower import lower as lower_function
    from tvm.target import Target

    with Target("ascend"):
        source: str = lower_function(kernel.build(), target="ascend").kernel_source
    lines = [line.rstrip() for line in source.strip().splitlines()]
    return f"// TileLang {tilelang.__version__}\n" + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the golden sources, all of them or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="kernels; all if none is named")
    parser.add_argument("--write", type=Path, required=True, metavar="DIRECTORY", help="where NAME.cpp goes")
    options = parser.parse_args(arguments)
    for name in options.names or KERNELS:
        source = lower(KERNELS[name])
        (options.write / f"{name}.cpp").write_text(source, encoding="utf-8")
        print(f"{name}: {len(source.splitlines())} lines")


if __name__ == "__main__":
    main()
