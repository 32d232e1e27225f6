"""Rotary frequencies of the model and the cos/sin table built from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PIECE = 4096


class RopeTable:
    """cos and sin of position * frequency, computed in float64, grown when a position asks for it.

    frequencies    float64 [F], radians per position
    max_positions  positions served: 0 .. max_positions - 1

    The table grows by pieces of 4,096 positions that are always computed alone, so an entry's bits do not depend on
    when it was computed. Not thread-safe while growing: one engine thread owns it.
    """

    def __init__(self, frequencies: Tensor, max_positions: int) -> None:
        if frequencies.dim() != 1 or frequencies.dtype != torch.float64:
            raise ValueError("frequencies must be a float64 vector")
        if max_positions < 1:
            raise ValueError(f"max_positions must be positive, got {max_positions}")
        self.frequencies = frequencies
        self.max_positions = max_positions
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def num_frequencies(self) -> int:
        """F: pairs of dims that are rotated."""
        return self.frequencies.shape[0]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Table [length, 2F] (cos, then sin) that covers `positions`, on their device.

        Host positions are looked at, and the table grows for them. On an accelerator a look would stall the step: there
        the table is what `cover` has made of it.
        raises  ValueError for a host position outside the range; RuntimeError where a device was never covered
        """
        device = positions.device
        if device.type != "cpu":
            covered = self._tables.get((dtype, device))
            if covered is None:
                raise RuntimeError(f"no position is covered on {device} in {dtype}: call RopeTable.cover first")
            return covered
        lowest, highest = (int(positions.min()), int(positions.max())) if positions.numel() else (0, 0)
        if lowest < 0 or highest >= self.max_positions:
            raise ValueError(f"positions must be in [0, {self.max_positions}), got {lowest} .. {highest}")
        return self._covering(highest, dtype, device)

    def cover(self, highest: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        """Make the table of a device reach position `highest`, so that `cos_sin` has it there without a look.

        A step calls it with the highest of its positions before its first kernel. ValueError outside the range.
        """
        if not 0 <= highest < self.max_positions:
            raise ValueError(f"highest must be in [0, {self.max_positions}), got {highest}")
        # A tensor's device always has its index.
        self._covering(highest, dtype, torch.empty(0, device=device).device)

    def _covering(self, highest: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        table = self._tables.get((dtype, device))
        if table is None or table.shape[0] <= highest:
            table = self._tables[(dtype, device)] = self._grow(table, highest, dtype).to(device)
        return table

    def _grow(self, table: Tensor | None, highest: int, dtype: torch.dtype) -> Tensor:
        done = 0 if table is None else table.shape[0] // _PIECE
        target = max(highest // _PIECE + 1, 2 * done)
        target = min(target, -(-self.max_positions // _PIECE))
        pieces = [] if table is None else [table.cpu()]
        for piece in range(done, target):
            positions = torch.arange(piece * _PIECE, (piece + 1) * _PIECE, dtype=torch.float64)
            angles = positions[:, None] * self.frequencies[None, :]
            pieces.append(torch.cat((torch.cos(angles), torch.sin(angles)), dim=1).to(dtype))
        return torch.cat(pieces).contiguous()


def plain_rope_table(rope_dim: int, theta: float, max_positions: int) -> RopeTable:
    """f_i = theta^(-2i / rope_dim): layers of ratio 0 and the draft blocks."""
    exponents = torch.arange(rope_dim // 2, dtype=torch.float64) * (-2.0 / rope_dim)
    return RopeTable(torch.pow(torch.tensor(theta, dtype=torch.float64), exponents), max_positions)


def yarn_rope_table(
    rope_dim: int,
    theta: float,
    max_positions: int,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_positions: int,
) -> RopeTable:
    """YaRN frequencies of the compressed layers; neither cos/sin nor the softmax scale is scaled.

    source  specification of the model, section 7.1
    """

    def correction(beta: float) -> float:
        return rope_dim * math.log(original_max_positions / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    base = plain_rope_table(rope_dim, theta, max_positions).frequencies
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return RopeTable(base / factor * (1.0 - keep) + base * keep, max_positions)
