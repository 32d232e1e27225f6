"""The frame of every layer: single-pass hyper-connections around one attention and one MoE.

Source: v41-flash.md sections 5 and 5.1. A sub-layer's input is collapsed with the `pre` that the sub-layer before it
produced; its own `pre` is handed on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from shoal_kernels.ops import hyper_connections
from shoal_kernels.ops.hyper_connections import MixWeight
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.moe import Moe
from shoal_model.trace import Trace
from shoal_model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Streams:
    """The N residual streams of the running rows and the weights that the next sub-layer collapses them with."""

    x: Tensor  # [rows, N, D]
    pre: Tensor  # [rows, N] wide

    @classmethod
    def start(cls, embedding: Tensor, num_streams: int, precision: Precision) -> Streams:
        """Every stream is the embedding [rows, D]; the first sub-layer reads stream 0."""
        pre = embedding.new_zeros((embedding.shape[0], num_streams), dtype=precision.wide)
        pre[:, 0] = 1.0
        return cls(embedding[:, None].expand(-1, num_streams, -1).contiguous(), pre)

    def select(self, rows: Tensor) -> Streams:
        """Only these rows."""
        return Streams(self.x.index_select(0, rows), self.pre.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class Normed:
    """A sub-layer's input: RMSNorm(Collapse(streams)), as it is and as FP8 linears take it."""

    x: Tensor  # [rows, D]
    cast: Tensor  # [rows, D]: Q8 of x, dequantised, where the precision casts activations; else x


class Block:
    """Hyper-connections, norms and MoE of one backbone layer or draft block; its attention is the caller's."""

    def __init__(
        self, weights: LayerWeights, config: ModelConfig, precision: Precision, *, experts_per_token: int, scope: str
    ) -> None:
        self._weights = weights
        self._config = config
        self._precision = precision
        self._scope = scope
        self._moe = Moe(weights.ffn, config, precision, experts_per_token=experts_per_token, scope=scope)

    @property
    def attn_norm(self) -> Tensor:
        """The norm of this block's attention input: what the block before it may apply already."""
        return self._weights.attn_norm

    def attention_input(self, streams: Streams) -> Normed:
        """The attention's input, where the block before has not made it."""
        return Normed(
            *hyper_connections.collapse_norm_cast(
                streams.x, streams.pre, self._weights.attn_norm, self._config.rms_norm_eps, precision=self._precision
            )
        )

    def finish(
        self, streams: Streams, attention: Tensor, following: Tensor | None, trace: Trace, *, cast: bool = True
    ) -> tuple[Streams, Normed | None]:
        """Add the attention's output [rows, D], then run the MoE: the streams after this block.

        following  norm of the sub-layer that comes next: its input is made in the same pass (`cast`: with the Q8 copy);
                   None where something else comes in between
        """
        c, precision = self._config, self._precision
        pre, post, comb = self._mix(streams.x, self._weights.hc_attn, "attn", trace)
        x, ffn_in, _ = hyper_connections.expand_norm(
            attention,
            streams.x,
            post,
            comb,
            pre,
            self._weights.ffn_norm,
            c.rms_norm_eps,
            cast=False,
            precision=precision,
        )
        y = self.feed_forward(ffn_in, trace)
        pre, post, comb = self._mix(x, self._weights.hc_ffn, "ffn", trace)
        if following is None:
            return Streams(hyper_connections.expand(y, x, post, comb, precision=precision), pre), None
        x, normed, quantised = hyper_connections.expand_norm(
            y, x, post, comb, pre, following, c.rms_norm_eps, cast=cast, precision=precision
        )
        return Streams(x, pre), Normed(normed, normed if quantised is None else quantised)

    def feed_forward(self, x: Tensor, trace: Trace) -> Tensor:
        """The MoE alone, on normalised rows [rows, D]."""
        trace.record(self._scope, "ffn_in", x)
        y = self._moe(x, trace)
        trace.record(self._scope, "ffn_out", y)
        return y

    def _mix(self, x: Tensor, weight: MixWeight, name: str, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, comb = hyper_connections.mix(
            x,
            weight,
            iterations=self._config.hc_sinkhorn_iters,
            eps=self._config.hc_eps,
            rms_eps=self._config.rms_norm_eps,
            precision=self._precision,
        )
        trace.record(self._scope, f"{name}_pre", pre)
        trace.record(self._scope, f"{name}_post", post)
        trace.record(self._scope, f"{name}_comb", comb)
        return pre, post, comb


def collapse_norm(streams: Streams, norm: Tensor, config: ModelConfig, precision: Precision) -> Tensor:
    """The final hidden rows: RMSNorm(Collapse(streams)), [rows, D]."""
    return hyper_connections.collapse_norm(streams.x, streams.pre, norm, config.rms_norm_eps, precision=precision)


def embed(table: Tensor, token_ids: Tensor, precision: Precision) -> Tensor:
    """Embedding rows in the activations' dtype, [rows, D]."""
    return torch.nn.functional.embedding(token_ids, table).to(precision.dtype)
