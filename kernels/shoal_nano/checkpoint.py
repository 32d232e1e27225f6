"""Training checkpoints small enough to carry: parameters as scaled float16, in pieces of at most 15 MB."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from shoal_nano.weights import Parameters

PIECE_BYTES = 15_000_000


def save(parameters: Parameters, log: dict[str, object], folder: Path) -> None:
    """Write `piece-N.bin` files and `training.json`. The optimiser's averages are not kept: a continued run warms up again."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {}
    for name, value in parameters.items():
        scale = value.detach().abs().max().clamp(min=1e-12).cpu()
        packed[name] = ((value.detach().cpu() / scale).half(), scale)
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    data = buffer.getvalue()
    for i, at in enumerate(range(0, len(data), PIECE_BYTES)):
        (folder / f"piece-{i}.bin").write_bytes(data[at : at + PIECE_BYTES])
    (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n")


def load(folder: Path) -> tuple[Parameters, dict[str, object]]:
    """Inverse of `save`. Raises FileNotFoundError if there is no checkpoint."""
    log: dict[str, object] = json.loads((folder / "training.json").read_text())
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("piece-*.bin")))
    packed = torch.load(io.BytesIO(data), weights_only=True)
    return {name: value.float() * scale for name, (value, scale) in packed.items()}, log
