"""Compilation of the CPU kernels with numba: one signature each, cached on disk, no fused or reordered arithmetic.

The cache lives in a folder named after a digest of the shared sources, so a change in a helper never leaves a stale
kernel behind, and in the user's cache folder where the package folder is read-only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# numba's own annotations describe the interpreter's view; kernels are compiled, so they are typed here instead.
_njit: Any = numba.njit
_intrinsic: Any = intrinsic
_config: Any = numba.config

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
_CONSTANTS = ("arith.py", "formats.py", "jit.py", "noise.py", "row_formats.py")
_KEPT_CACHES = 4


def kernel(signature: str, *, cached: bool = True) -> Callable[[F], F]:
    """Compile a kernel for exactly this numba signature, now; with `cached`, load it from the cache if it is there."""

    def decorate(function: F) -> F:
        before = _config.CACHE_DIR
        _config.CACHE_DIR = str(cache_folder())
        try:
            compiled: F = _njit(signature, cache=cached, **_OPTIONS)(function)
        finally:
            _config.CACHE_DIR = before
        return compiled

    return decorate


def inline(function: F) -> F:
    """A helper that is compiled into every kernel that calls it."""
    compiled: F = _njit(forceinline=True, **_OPTIONS)(function)
    return compiled


@cache
def cache_folder() -> Path:
    """The folder of this version's compiled kernels, created; older versions beyond the last few are removed."""
    package = Path(__file__).parent
    digest = hashlib.sha256(f"{numba.__version__} {version('llvmlite')}".encode())
    for source in sorted(package.rglob("*.py")):
        # numba itself notices a change in the file that defines a kernel, not in the files whose helpers it uses.
        if source.name.endswith("_nb.py") or source.name in _CONSTANTS:
            digest.update(source.read_bytes())
    private = Path(tempfile.gettempdir()) / f"shoal-kernels-{os.getuid()}"
    parents = [package / "__pycache__", Path("~/.cache/shoal").expanduser(), private]
    return writable_folder(parents, f"kernels-{digest.hexdigest()[:16]}")


def writable_folder(parents: Sequence[Path], name: str) -> Path:
    """Create and return the first parent/name that this user owns and can write; OSError if there is none.

    Compiled code is read back from here, so a folder that somebody else has put in place is passed over.
    """
    for parent in parents:
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with tempfile.TemporaryFile(dir=folder):
                os.utime(folder)
        except OSError:
            continue
        _remove_old(parent)
        return folder
    raise OSError(f"no folder for compiled kernels can be written: {', '.join(map(str, parents))}")


def _remove_old(parent: Path) -> None:
    folders = sorted(parent.glob("kernels-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[_KEPT_CACHES:]:
        shutil.rmtree(folder, ignore_errors=True)


def _bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as int32, or of a float64 as int64."""
    integer = types.int32 if value == types.float32 else types.int64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return integer(value), codegen


def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with the given int32 bits, or the float64 with the given int64 bits."""
    real = types.float32 if bits == types.int32 else types.float64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return real(bits), codegen


bits_of: Callable[[Any], Any] = _intrinsic(_bits_of)
float_of: Callable[[Any], Any] = _intrinsic(_float_of)
