"""Router, routed experts and shared expert of one layer. Source: v41-flash.md section 9."""

from __future__ import annotations

from shoal_kernels.ops import experts, linear, router
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.trace import Trace
from shoal_model.weights import MoeWeights


class Moe:
    """One layer's experts, bound to their weights."""

    def __init__(
        self, weights: MoeWeights, config: ModelConfig, precision: Precision, *, experts_per_token: int, scope: str
    ) -> None:
        self._weights = weights
        self._precision = precision
        self._top = experts_per_token
        self._scale = config.routed_scaling_factor
        self._limit = config.swiglu_limit
        self._scope = scope

    def __call__(self, x: Tensor, trace: Trace) -> Tensor:
        """Routed and shared outputs of normalised rows [rows, D], rounded once: [rows, D]."""
        w = self._weights
        logits = linear.linear(x, w.gate, out="f32", precision=self._precision)
        ids, weights = router.route(logits, w.bias, self._top, self._scale, precision=self._precision)
        trace.record(self._scope, "ffn.expert_ids", ids)
        trace.record(self._scope, "ffn.expert_weights", weights)
        return experts.moe(x, ids, weights, w.experts, w.shared, self._limit, precision=self._precision)
