"""Generates protos/gen from protos/shoal; with --check only says whether the committed code is what would come out."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS / "gen"


def generate(out: Path) -> None:
    """Write modules and stubs of every .proto below `out`/shoal. Exits with protoc's complaint on an error."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "shoal").rglob("*.proto"))
    includes = [PROTOS, Path(grpc_tools.__file__).parent / "_proto", Path(sysconfig.get_paths()["purelib"])]
    plugins = [f"--plugin={name}={_plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    code = protoc.main(["protoc", *(f"-I{path}" for path in includes), *plugins, *outputs, *sources])
    if code != 0:
        sys.exit(code)
    for service in out.rglob("*_pb2_grpc.py"):
        if "add_" not in service.read_text(encoding="utf-8"):
            service.unlink()
            service.with_suffix(".pyi").unlink(missing_ok=True)


def _plugin(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} not found: install the dev dependency group")
    return found


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / "shoal").rglob("*_pb2*") if path.suffix in {".py", ".pyi"}}


def drift(fresh: Path) -> list[str]:
    """Paths below protos/gen that differ from `fresh`, are missing, or should not be there."""
    both = _files(fresh) & _files(GENERATED)
    changed = {name for name in both if not filecmp.cmp(fresh / name, GENERATED / name, shallow=False)}
    return sorted(changed | (_files(fresh) ^ _files(GENERATED)))


def main() -> None:
    """Entry point of `make proto` and of its check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on drift")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        stale = drift(fresh)
        if args.check:
            if stale:
                sys.exit("protos/gen is stale, run `make proto`: " + ", ".join(stale))
            return
        for name in stale:
            target = GENERATED / name
            if (fresh / name).exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(fresh / name, target)
            else:
                target.unlink()
            print(f"protos/gen/{name}")


if __name__ == "__main__":
    main()
