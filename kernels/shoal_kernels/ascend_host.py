# mypy: ignore-errors
"""Launches an Ascend kernel: builds and compiles it once per static size. Needs TileLang and the vendor's CANN.

Nothing here has run: this is the seam that the registry chooses for device type "npu".
"""

import functools

from shoal_kernels.registry import BackendUnavailable


def run(builder, tensors, **sizes) -> None:
    """Run `builder(**sizes)` on tensors, inputs and outputs in the order of its parameters; outputs are written.

    Raises BackendUnavailable if it cannot be compiled here, ValueError for sizes the kernel cannot do.
    """
    _compiled(builder, tuple(sorted(sizes.items())))(*tensors)


@functools.cache
def _compiled(builder, sizes):
    try:
        import tilelang
        from tvm.target import Target

        with Target("ascend"):
            return tilelang.compile(builder(**dict(sizes)), target="ascend")
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(f"{builder.__module__}.{builder.__name__} cannot be compiled: {error}") from error
