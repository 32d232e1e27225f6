"""Compiles Triton kernels for a GPU that is not here, in a process of its own: there the interpreter is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
request = json.load(sys.stdin)
kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
source = triton.compiler.ASTSource(fn=kernel, signature=request["signature"], constexprs=request["constants"])
compiled = triton.compile(source, target=GPUTarget("cuda", request["capability"], 32), options=request["options"])
json.dump({"ptx": compiled.asm["ptx"], "shared": compiled.metadata.shared}, sys.stdout)
"""


def compile_ptx(
    module: str,
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    capability: int,
    num_warps: int = 4,
    num_stages: int = 3,
) -> str:
    """PTX of `module.kernel` for capability 90 or 100.

    signature  every parameter in order: "*bf16", "*u8", "fp32", "i32", ..., "constexpr" for those in `constants`
    """
    request = {
        "module": module,
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "capability": capability,
        "options": {"num_warps": num_warps, "num_stages": num_stages},
    }
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(_ROOT / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return str(json.loads(done.stdout)["ptx"])
