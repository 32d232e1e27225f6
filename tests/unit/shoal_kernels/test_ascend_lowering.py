"""The Ascend kernels lower to the AscendC sources kept beside this file. Nothing here compiles or runs them.

A change is taken over with `python -m shoal_kernels.ascend_lower --write tests/unit/shoal_kernels/ascend_golden`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from shoal_kernels import SERVED_BF16, BackendUnavailable
from shoal_kernels.ascend_lower import KERNELS, lower
from shoal_kernels.registry import resolve

GOLDEN = Path(__file__).parent / "ascend_golden"
# Two of vector cores, one of the Cube; the rest takes a minute and a half.
EVERYDAY = ("rms_norm", "cast_q4ue")
KEYWORDS = ("new", "delete", "this", "class", "register", "template")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs TileLang")


def _assert_golden(name: str) -> None:
    want = (GOLDEN / f"{name}.cpp").read_text(encoding="utf-8")
    version = importlib.metadata.version("tilelang")
    if want.splitlines()[0] != f"// TileLang {version}":
        pytest.skip(f"the sources were written by another TileLang than {version}")
    assert lower(KERNELS[name]) == want


@pytest.mark.parametrize("name", EVERYDAY)
def test_ascend_kernel_lowers_to_its_golden_source(name: str) -> None:
    _assert_golden(name)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(KERNELS) - set(EVERYDAY)))
def test_other_ascend_kernel_lowers_to_its_golden_source(name: str) -> None:
    _assert_golden(name)


def test_every_ascend_kernel_has_a_golden_source_and_no_other_is_there() -> None:
    assert {path.stem for path in GOLDEN.glob("*.cpp")} == set(KERNELS)


def test_ascend_products_run_on_the_cube_and_scaled_ones_take_the_stored_codes() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.cpp")}
    for name in ("linear_fp8", "linear_fp8_grouped"):
        assert "ascend_blockscaled_gemm_l1" in sources[name]
        assert "float8_e4m3_t, uint16_t, float>" in sources[name]
    assert "float4_e2m1x2_t, uint16_t, float>" in sources["indexer_scores"]
    for name in ("linear_bf16", "mix_partials", "experts_gate_up", "sparse_attention", "head_argmax"):
        assert "ascend_gemm_l1" in sources[name]


def test_ascend_sources_name_no_variable_after_a_keyword() -> None:
    for path in GOLDEN.glob("*.cpp"):
        words = set(path.read_text(encoding="utf-8").replace("(", " ").replace(";", " ").split())
        assert not words & set(KEYWORDS), path.stem


def test_ascend_kernel_of_a_size_it_cannot_do_is_refused() -> None:
    kernel = KERNELS["linear_fp8"]
    with pytest.raises(ValueError, match="K in steps of 256"):
        type(kernel)(kernel.builder, {**kernel.sizes, "k": 96}).build()


def test_ascend_implementations_are_chosen_for_an_npu_only() -> None:
    for op in ("linear", "mix", "rms_norm", "rms_norm_rope", "route"):
        assert resolve(op, "npu", SERVED_BF16).__module__.endswith(".ascend")
        with pytest.raises(BackendUnavailable):
            resolve(op, "cuda", SERVED_BF16, "ascend")
    with pytest.raises(BackendUnavailable, match="npu"):
        resolve("sparse_attention", "npu", SERVED_BF16)


def test_the_golden_ascend_sources_are_of_the_locked_tilelang() -> None:
    """Else every comparison above would be skipped from the day the lock moves on."""
    lock = Path(__file__).resolve().parents[3] / "constraints.txt"
    (locked,) = [line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("tilelang==")]
    first_lines = {path.read_text(encoding="utf-8").splitlines()[0] for path in GOLDEN.glob("*.cpp")}
    assert first_lines == {f"// TileLang {locked.removeprefix('tilelang==')}"}
