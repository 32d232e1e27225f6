"""docs/add-a-service.md and docs/add-an-op.md, followed for everything that exists."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from shoal_kernels.registry import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]
SERVICES = [*sorted(path.parent.parent.name for path in ROOT.glob("services/*/shoal_*/servicer.py")), "gateway"]
OPS = sorted(path.parent.name for path in ROOT.glob("kernels/shoal_kernels/ops/*/__init__.py"))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_all_five_services_and_every_operation_are_looked_at() -> None:
    assert set(SERVICES) == {"scheduler", "prefill_worker", "decode_worker", "kv_cache", "gateway"}
    assert {"linear", "experts", "sparse_attention", "indexer", "sampling"} <= set(OPS)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_a_package_that_is_wired_only_in_its_main(name: str) -> None:
    package = ROOT / "services" / name / f"shoal_{name}"
    assert not (package.parent / "__init__.py").exists()
    for module in ("__main__.py", "config.py", "py.typed"):
        assert (package / module).is_file(), module
    assert "class " in (package / "config.py").read_text(encoding="utf-8")
    readers = [path for path in package.rglob("*.py") if "os.environ" in path.read_text(encoding="utf-8")]
    assert {path.name for path in readers} <= {"__main__.py", "mock_rank.py"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_the_settings_that_operators_expect(name: str) -> None:
    module = importlib.import_module(f"shoal_{name}.config")
    configs = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__name__.endswith("Config")]
    fields = set().union(*(getattr(kind, "__dataclass_fields__", {}) for kind in configs))
    assert {"listen_address", "advertised_address", "admin_address", "drain_grace_s"} <= fields


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_packaged_bordered_and_deployed(name: str) -> None:
    settings = project()
    package = f"services/{name}/shoal_{name}"
    assert package in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert f"services/{name}" in settings["tool"]["hatch"]["build"]["dev-mode-dirs"]
    assert f"services/{name}" in settings["tool"]["mypy"]["mypy_path"]
    assert name in settings["project"]["optional-dependencies"]
    contracts = settings["tool"]["importlinter"]["contracts"]
    assert any(contract["type"] == "independence" and f"shoal_{name}" in contract["modules"] for contract in contracts)
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    assert name in compose["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_its_tests(name: str) -> None:
    where = [ROOT / "tests" / "unit" / f"shoal_{name}", ROOT / "tests" / "e2e"]
    assert any(
        f"shoal_{name}" in path.read_text(encoding="utf-8") for folder in where for path in folder.rglob("test_*.py")
    )


@pytest.mark.parametrize("name", OPS)
def test_an_operation_has_contract_reference_test_and_benchmark(name: str) -> None:
    folder = ROOT / "kernels" / "shoal_kernels" / "ops" / name
    assert (folder / "reference.py").is_file()
    contract = importlib.import_module(f"shoal_kernels.ops.{name}")
    assert inspect.getdoc(contract)
    functions = [
        function
        for public, function in inspect.getmembers(contract, inspect.isfunction)
        if function.__module__ == contract.__name__ and not public.startswith("_")
    ]
    assert all(inspect.getdoc(function) for function in functions)
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests/unit/shoal_kernels").glob("test_*")}
    imports = (f"ops.{name} import", f"ops import {name}")
    assert f"test_{name}.py" in tests or any(one in text for one in imports for text in tests.values())


@pytest.mark.parametrize("name", OPS)
def test_an_operation_on_accelerators_has_its_device_test(name: str) -> None:
    entries = [e for entries in IMPLEMENTATIONS.values() for e in entries if f".ops.{name}." in e.target]
    assert any(entry.backend == "triton" for entry in entries)
    tests = ROOT / "tests" / "unit" / "shoal_kernels"
    assert (tests / f"test_{name}_device.py").is_file()
    cases = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "bench" / "device_cases").glob("*.py")]
    imported = rf"^from shoal_kernels\.ops(\.{name} import|(?= import).*\b{name}\b)"
    assert any(re.search(imported, text, re.MULTILINE) for text in cases)
