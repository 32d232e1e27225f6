"""Intermediate values of a forward pass, for tests and diagnosis."""

from __future__ import annotations

from torch import Tensor


class Trace:
    """Receives named intermediates and forgets them: what serving uses."""

    def record(self, scope: str, name: str, value: Tensor) -> None:
        """`scope` is the module ("layers.3", "mtp.0", "" for the model), `name` the value inside it."""


class Recorder(Trace):
    """Keeps every recorded value under "scope.name"; the last one wins where a name comes twice."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def record(self, scope: str, name: str, value: Tensor) -> None:
        self.values[f"{scope}.{name}" if scope else name] = value.detach().clone()


SILENT = Trace()
