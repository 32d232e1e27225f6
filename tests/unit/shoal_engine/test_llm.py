"""Offline generation on the golden tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shoal_common.errors import InvalidArgument, Unavailable
from shoal_engine import LLM, SamplingParams
from shoal_engine.errors import ExceedsCapacity, PromptTooLong, TokenOutOfRange
from shoal_model.config import ModelConfig
from shoal_model.errors import CheckpointError
from shoal_model.synthetic import Synthetic
from support.tiny_model import TINY, text

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, max_model_len=200, max_num_seqs=3) as llm:
        yield llm


def test_a_text_gives_a_text(llm: LLM) -> None:
    (said,) = llm.generate("def f(x):", GREEDY)
    (result,) = llm.generate("def f(x):", GREEDY, decode_sequence=False)
    assert said == result.outputs[0].text
    assert result.prompt_token_ids[0] == 0
    assert list(result.prompt_token_ids[1:]) == llm.get_tokenizer().encode("def f(x):", add_special_tokens=False).ids
    assert len(result.outputs[0].token_ids) == 8
    assert result.outputs[0].finish_reason == "length"


def test_more_prompts_than_slots_come_back_in_order(llm: LLM) -> None:
    prompts = [text(3 + i, i) for i in range(7)]
    together = llm.generate(prompts, GREEDY, decode_sequence=False)
    assert [list(r.prompt_token_ids) for r in together] == prompts
    alone = [llm.generate(prompt_token_ids=[p], sampling_params=GREEDY, decode_sequence=False)[0] for p in prompts]
    assert [r.outputs for r in together] == [r.outputs for r in alone]


def test_a_seed_fixes_the_answer_and_without_one_it_is_drawn_and_told(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    first, second = (llm.generate([text(9)], params, decode_sequence=False)[0] for _ in range(2))
    assert first.outputs == second.outputs
    (free,) = llm.generate([text(9)], SamplingParams(max_tokens=12, ignore_eos=True), decode_sequence=False)
    again = SamplingParams(max_tokens=12, seed=free.seed, ignore_eos=True)
    assert llm.generate([text(9)], again, decode_sequence=False)[0].outputs == free.outputs


def test_each_prompt_may_have_its_own_parameters_and_choices(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, top_logprobs=2)]
    one, three = llm.generate([text(9), text(9)], params, decode_sequence=False)
    assert [len(one.outputs), len(three.outputs)] == [1, 3]
    assert len({choice.token_ids for choice in three.outputs}) == 3
    assert all(len(choice.logprobs) == 5 and len(choice.logprobs[0].top) == 2 for choice in three.outputs)
    assert three.usage.output_tokens == 15


def test_the_verify_width_changes_no_token(llm: LLM) -> None:
    with LLM(TINY, max_model_len=200, max_num_seqs=1, verify_width=0) as plain:
        params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
        expected = plain.generate([text(30)], params)
        (result,) = plain.generate([text(30)], params, decode_sequence=False)
    assert llm.generate([text(30)], params) == expected
    assert result.usage.draft_tokens == 0


def test_progress_is_shown_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([text(3), text(4)], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_nothing_to_do_gives_nothing(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([[-1]], TokenOutOfRange),
        ([[512]], TokenOutOfRange),
        ([[2**70]], InvalidArgument),
        ([["x"]], InvalidArgument),
        ([[5.0, 6.5]], InvalidArgument),
        ([[True]], InvalidArgument),
        ([[]], InvalidArgument),
        ([[5] * 200], PromptTooLong),
        (["\ud800"], InvalidArgument),
    ],
)
def test_a_bad_prompt_is_a_clear_error_and_the_next_call_works(
    llm: LLM, prompts: list[Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate([text(3), *prompts], GREEDY)
    assert len(llm.generate([text(3)], GREEDY)) == 1


def test_more_choices_than_slots_do_not_fit(llm: LLM) -> None:
    with pytest.raises(ExceedsCapacity):
        llm.generate([text(3)], SamplingParams(n=4), decode_sequence=False)


def test_wrong_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="decode_sequence"):
        llm.generate("x", SamplingParams(n=2))
    with pytest.raises(InvalidArgument, match="prompts"):
        llm.generate()
    with pytest.raises(InvalidArgument, match="2 given for 1"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(InvalidArgument, match="n"):
        SamplingParams(n=0)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidArgument, match="seed"):
        SamplingParams(seed=-1)


@pytest.mark.parametrize(
    "setting",
    [{"max_num_seqs": 0}, {"verify_width": -1}, {"verify_width": 6}, {"threads": 0}, {"max_num_batched_tokens": 0}],
)
def test_a_wrong_setting_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(setting))):
        LLM(TINY, **setting)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no config"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        LLM(tmp_path)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(TINY, max_model_len=130, max_num_seqs=1)
    llm.close()
    with pytest.raises(Unavailable):
        llm.generate("x", GREEDY)


def test_a_process_that_never_closes_its_model_ends_well() -> None:
    script = (
        f"from shoal_engine import LLM, SamplingParams\nllm = LLM({str(TINY)!r}, max_model_len=64, max_num_seqs=1)\n"
    )
    script += "print(llm.generate('x = ', SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


class Small(Synthetic):
    """Random weights of the tiny sizes."""

    def config(self) -> ModelConfig:
        return ModelConfig.load(TINY)


def test_a_synthetic_model_takes_and_gives_token_ids() -> None:
    with LLM(synthetic=Small(seed=3), max_model_len=256, max_num_seqs=1) as drawn:
        (result,) = drawn.generate([[0, 5, 9]], SamplingParams(temperature=0.0, max_tokens=5), decode_sequence=False)
        assert result.outputs[0].text == " ".join(map(str, result.outputs[0].token_ids))
        with pytest.raises(InvalidArgument, match="no tokenizer"):
            drawn.generate("a text")


@pytest.mark.parametrize(("device", "problem"), [("gpu", "cpu, cuda"), ("npu", "not yet run")])
def test_a_device_that_is_none_is_named(device: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        LLM(TINY, device=device)
