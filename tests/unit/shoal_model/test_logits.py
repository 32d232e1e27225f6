"""Whole-sequence logits, as `shoal model logits` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shoal_model.errors import CheckpointError
from shoal_model.logits import sequence_logits, write_sequence_logits
from support.tiny_model import TINY, golden


@pytest.mark.parametrize(("numerics", "name"), [("exact", "text_exact"), ("kv", "text_kv")])
def test_logits_are_the_recorded_ones(tmp_path: Path, numerics: str, name: str) -> None:
    out = tmp_path / "logits.safetensors"
    write_sequence_logits(TINY, golden(name)["ids"].tolist(), out, numerics)
    written = load_file(out)
    assert list(written) == ["logits"]
    assert written["logits"].dtype == torch.float32
    torch.testing.assert_close(written["logits"], golden(name)["logits"], rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "between 1 and 4096"), ([1] * 4097, "between 1 and 4096"), ([1, 512], "512"), ([-1], "-1")],
)
def test_ids_that_the_model_cannot_run_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence_logits(TINY, ids)


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ValueError, match="numerics must be one of exact, kv, served"):
        sequence_logits(TINY, [1], "fast")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        sequence_logits(tmp_path, [1])


def test_a_missing_output_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        write_sequence_logits(TINY, [1], tmp_path / "absent" / "logits.safetensors", "served")


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_sequence_logits(TINY, [1], tmp_path, "served")
