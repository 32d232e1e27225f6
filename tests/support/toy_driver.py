"""Drivers over the toy model."""

from __future__ import annotations

from typing import Any

from support.engine_driver import Driver
from support.toy_model import REPLAY, ToyModel

# Both sides of the window, the replay length, blocks of 128 and the first prompts with a usable hit.
LENGTHS = [1, 2, 15, 16, 17, 23, 24, 25, 127, 128, 129, 152, 153, 255, 256, 257, 280, 300]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A reproducible prompt of the toy vocabulary."""
    return [3 + (i * i + 7 * i + salt) % 90 for i in range(length)]


def driver(
    *, block_count: int = 64, slot_count: int = 8, quality: int = 70, model_context: int = 100_000, **more: Any
) -> Driver:
    """A driver over a fresh toy model; `quality` of 100 drafts are right."""
    model = ToyModel(block_count=block_count, slot_count=slot_count, draft_quality=quality, max_context=model_context)
    return Driver(model, replay_length=REPLAY, **more)


def toy(d: Driver) -> ToyModel:
    """The model behind a driver."""
    model = d.core._model
    assert isinstance(model, ToyModel)
    return model
