"""Muon for the matrices, Adam for everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_nano.config import NanoConfig
from shoal_nano.weights import Parameters, specs

# Adam's step sizes relative to its base rate, by ending of the stack's name; the first match counts.
_ADAM_SCALE = {"_fn": 0.15, "_bias": 0.0}
_ADAM_MATRICES = ("embed", "head", "ffn.gate", "weights_proj", "confidence", "_fn", "engram.q_weight", "engram.k_weight")


def is_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a stack holds matrices that Muon moves."""
    if ".embed" in name or len(shape) < 2 or any(name.endswith(end) for end in _ADAM_MATRICES):
        return False
    stacked = len(shape) > 2 or name == "mtp.main_proj"
    return stacked and "norm" not in name


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of [..., r, c], by the quintic Newton-Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimiser:
    """Muon (Nesterov momentum, update RMS 0.2 x rate, decoupled decay) and AdamW over named parameters."""

    def __init__(self, parameters: Parameters, config: NanoConfig, *, muon_rate: float, adam_rate: float, decay: float,
                 momentum: float = 0.95) -> None:  # fmt: skip
        known = specs(config)
        self._muon = {n: p for n, p in parameters.items() if is_muon(n, known[n].shape)}
        self._buffers = {n: torch.zeros_like(p) for n, p in self._muon.items()}
        self._momentum, self._decay = momentum, decay
        self._muon_rate = muon_rate
        groups = []
        for name, p in parameters.items():
            if name in self._muon or not p.requires_grad:
                continue
            scale = next((s for end, s in _ADAM_SCALE.items() if name.endswith(end)), 1.0)
            groups.append({"params": [p], "lr": adam_rate * scale, "base": adam_rate * scale})
        self._adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.98), eps=1e-12, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step at `rate` times the base rates; clears the gradients. Parameters without a gradient stay."""
        for group in self._adam.param_groups:
            group["lr"] = group["base"] * rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, p in self._muon.items():
            if p.grad is not None:
                by_shape.setdefault(tuple(p.shape[-2:]), []).append(name)
        for names in by_shape.values():
            directions = []
            for name in names:
                gradient, buffer = self._muon[name].grad, self._buffers[name]
                assert gradient is not None
                buffer.lerp_(gradient, 1 - self._momentum)
                directions.append(gradient.lerp(buffer, self._momentum).view(-1, *buffer.shape[-2:]))
            update = orthogonalise(torch.cat(directions))
            lr = self._muon_rate * rate
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            for name, piece in zip(names, update.split([len(d) for d in directions]), strict=True):
                p = self._muon[name]
                p.mul_(1 - lr * self._decay).add_(piece.view_as(p), alpha=-lr * scale)
                p.grad = None
