"""Errors that a checkpoint on disk can cause."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the file at fault and, in one sentence, what is wrong with which part."""

    def __init__(self, path: str | Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = str(path)
        self.detail = detail
