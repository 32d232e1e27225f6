"""Before a worker serves, steps of every size run once: nothing is left of them, and nothing is compiled later."""

from __future__ import annotations

import itertools
import logging

import pytest
from shoal_engine.compile_ahead import compile_ahead, row_counts
from shoal_engine.served_model import ServedModel
from support.engine_driver import RandomWidths
from support.exactness import CASES, assert_same, driver
from support.on_device import needs_device
from support.tiny_model import tiny_model


def kind(rows: int) -> tuple[bool, bool, bool, int]:
    """What Triton's kernels and tiles tell numbers of rows apart by."""
    return rows == 1, rows % 16 == 0, rows % 4 == 0, (rows - 1).bit_length()


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 31, 100, 512, 513, 2048])
def test_every_number_of_rows_has_one_of_its_kind(most: int) -> None:
    counts = row_counts(most)
    assert counts == sorted({*counts})
    assert counts[0] >= 1
    assert counts[-1] == most
    # 16 is the only multiple of 16 up to 16: that kind is met among the others, too.
    assert {kind(n) for n in range(1, most + 1)} == {kind(n) for n in counts}
    assert len(counts) <= 9 * most.bit_length()


def small_model() -> ServedModel:
    return ServedModel(tiny_model(num_blocks=12, num_slots=5))


@pytest.mark.parametrize("is_prefill_only", [False, True])
def test_slots_are_empty_afterwards_and_answers_are_the_same(is_prefill_only: bool) -> None:
    model = small_model()
    assert compile_ahead(model, step_rows=20, verify_width=3, is_prefill_only=is_prefill_only, limit_s=600.0)
    cases = CASES[5:9]
    d = driver(cases, model=model, planner=RandomWidths(1))
    d.generate(*(case.request() for case in cases))
    assert_same(d, cases)


def test_a_start_that_takes_too_long_is_cut_short_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ticks = itertools.count(step=4.0)
    with caplog.at_level(logging.INFO, logger="shoal_engine.compile_ahead"):
        done = compile_ahead(
            small_model(), step_rows=8, verify_width=0, is_prefill_only=True, limit_s=20.0, now=lambda: next(ticks)
        )
    assert not done
    told = [record.message for record in caplog.records]
    assert told[0] == "compiling kernels"
    assert told[-1] == "kernels are compiled while serving"


@pytest.mark.gpu
@needs_device
def test_on_a_device_no_kernel_is_compiled_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilelang
    from triton.runtime.jit import JITFunction

    model, compiled = ServedModel(tiny_model(num_blocks=160, num_slots=72)), list[str]()
    compile_ahead(model, step_rows=128, verify_width=5, is_prefill_only=False, limit_s=600.0)
    triton_compile, tilelang_compile = JITFunction._do_compile, tilelang.compile

    def watched(function: JITFunction[object], *arguments: object, **named: object) -> object:
        compiled.append(function.__name__)
        return triton_compile(function, *arguments, **named)

    def watched_tilelang(*arguments: object, **named: object) -> object:
        compiled.append("tilelang")
        return tilelang_compile(*arguments, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", watched)
    monkeypatch.setattr(tilelang, "compile", watched_tilelang)
    driver(CASES, model=model, rows=128, chunk=100).generate(*(case.request() for case in CASES))
    assert compiled == []
