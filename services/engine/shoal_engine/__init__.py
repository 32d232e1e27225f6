"""The step loop shared by both workers, and the offline LLM.

The names below load torch when they are first used, so that what needs none (events, requests, pools) stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal_engine.llm import LLM, ChoiceOutput, RequestOutput
    from shoal_engine.sampling_params import SamplingParams

__all__ = ["LLM", "ChoiceOutput", "RequestOutput", "SamplingParams"]

_HOMES = {"LLM": "llm", "ChoiceOutput": "llm", "RequestOutput": "llm", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
