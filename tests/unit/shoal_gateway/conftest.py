"""One encoder on the tiny model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepseek_recipe import Tokenizer
from shoal_gateway.encode import Encoder
from shoal_gateway.served_model import ServedModel, read_served_model

TINY = Path(__file__).parents[2] / "golden" / "data" / "tiny"


@pytest.fixture(scope="session")
def tiny() -> tuple[ServedModel, Tokenizer]:
    return read_served_model(TINY, name="deepseek-flash", aliases=("older-name",), created_s=1)


@pytest.fixture(scope="session")
def encoder(tiny: tuple[ServedModel, Tokenizer]) -> Encoder:
    model, tokenizer = tiny
    return Encoder(model, tokenizer, context=lambda: model.max_context_tokens, draw_seed=lambda: 77)


@pytest.fixture(scope="session")
def tokenizer(tiny: tuple[ServedModel, Tokenizer]) -> Tokenizer:
    return tiny[1]
