"""Logits of a whole sequence, replay off: what other implementations are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from shoal_kernels.precision import EXACT, KV, SERVED, Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.device import DeviceUnavailable, open_device, served_precision
from shoal_model.model import Model
from shoal_model.sequence import SequenceRun, blocks_for

PRECISIONS = {precision.name: precision for precision in (EXACT, KV, SERVED)}

_CHUNK_ROWS = 256


def sequence_logits(
    directory: str | Path, token_ids: Sequence[int], numerics: str = "served", *, device: str = "cpu"
) -> Tensor:
    """Logits [T, V] float32, in host memory, after every token of a sequence.

    numerics  "exact": float64 without casts; "kv": float32 with the cache's casts only; "served": all roundings
    device    an accelerator computes "served" only
    raises    CheckpointError; ValueError for unknown numerics, no token, a token outside the vocabulary, or too many,
              for a device that is not there or does not compute these numerics
    """
    if numerics not in PRECISIONS:
        raise ValueError(f"numerics must be one of {', '.join(PRECISIONS)}, got {numerics!r}")
    _check_ids(token_ids, ModelConfig.load(directory))
    model = Model.load(
        directory,
        precision=_precision(numerics, device),
        device=device,
        num_blocks=1 + blocks_for(len(token_ids)),
        num_slots=1,
    )
    run = SequenceRun(model, slot=0, block_table=range(1, 1 + blocks_for(len(token_ids))))
    parts = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        chunk = token_ids[start : start + _CHUNK_ROWS]
        parts.append(model.logits(run.run(chunk, range(len(chunk)))).to(torch.float32).cpu())
    return torch.cat(parts)


def write_sequence_logits(
    directory: str | Path, token_ids: Sequence[int], out: str | Path, numerics: str, *, device: str = "cpu"
) -> Tensor:
    """`sequence_logits`, also written to the safetensors file `out`. ValueError where that cannot be written."""
    if not Path(out).resolve().parent.is_dir():
        raise ValueError(f"the folder of {out} does not exist")
    logits = sequence_logits(directory, token_ids, numerics, device=device)
    try:
        save_file({"logits": logits}, out, metadata={"numerics": numerics})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    return logits


def _precision(numerics: str, device: str) -> Precision:
    try:
        served = served_precision(open_device(device))
    except DeviceUnavailable as error:
        raise ValueError(str(error)) from error
    if served is SERVED:
        return PRECISIONS[numerics]
    if numerics != SERVED.name:
        raise ValueError(f"device {device} computes numerics {SERVED.name} only, not {numerics}")
    return served


def _check_ids(token_ids: Sequence[int], config: ModelConfig) -> None:
    vocabulary, limit = config.vocab_size, config.max_position_embeddings
    if not 0 < len(token_ids) <= limit:
        raise ValueError(f"between 1 and {limit} token ids are wanted, got {len(token_ids)}")
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"token id {token_id} is not in [0, {vocabulary})")
