"""What a device bench measures: one kernel at one workload, with the least it must move and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table.

    kernel    what is measured; cases of one kernel stand together
    workload  shapes in words: "256 requests x 6 rows, 131,072 positions"
    runs      the same call over different input sets, rotated so that one run does not find the last one's data in the
              L2 cache; each call enqueues its work on the current stream and neither synchronises nor allocates much
    bytes     least traffic of device memory: every input read once, every output written once
    flops     of the matrix products (two per multiply-add)
    scaled    products scaled every 32 of K (FP8 linears, experts, index scores): the floor is told at the FP8 rate too
    target    least fraction of the floor (at the bf16 rate); None: told, not judged
    peers     other implementations of the same work in the same run, by name
    """

    kernel: str
    workload: str
    runs: Sequence[Callable[[], object]]
    bytes: int
    flops: int = 0
    scaled: bool = False
    target: float | None = None
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
