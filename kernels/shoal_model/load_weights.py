"""From the tensors of a checkpoint to `BackboneWeights`. Source: v41-flash specification, section 3.3."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from shoal_kernels.ops.engram import EngramTable, gate_weight
from shoal_kernels.ops.experts import ExpertWeights
from shoal_kernels.ops.hyper_connections import MixWeight
from shoal_kernels.ops.linear import LinearWeight
from shoal_kernels.precision import SERVED, Precision
from torch import Tensor

from shoal_model.checkpoint import Checkpoint
from shoal_model.config import ModelConfig
from shoal_model.engram_tables import EngramHash, build_hashes
from shoal_model.inventory import Part
from shoal_model.layer_map import LayerPlan, build_layer_map
from shoal_model.tensor_reader import TensorReader, TensorSource
from shoal_model.token_map import load_compressed_ids
from shoal_model.weights import (
    AttentionWeights,
    BackboneWeights,
    DraftWeights,
    EngramLayerWeights,
    IndexKeyWeights,
    LayerWeights,
    MoeWeights,
)


def load_weights(
    checkpoint: Checkpoint, *, precision: Precision = SERVED, device: str | torch.device = "cpu"
) -> BackboneWeights:
    """Read and prepare every text weight; image tensors are left unread, Engram tables stay mapped in host memory.

    Weights are kept as the checkpoint's bytes where the precision says so, else as values.

    Raises CheckpointError: a file that fails while it is read, Engram tables or tokenizer that contradict the config.
    """
    config = checkpoint.config
    hashes: dict[int, EngramHash] = {}
    compressed_ids: Tensor | None = None
    if config.engram is not None:
        hashes = {h.layer: h for h in build_hashes(config.engram, checkpoint.directory / "config.json")}
        compressed_ids = torch.from_numpy(load_compressed_ids(checkpoint.directory, config))
    reader = TensorReader(checkpoint, device)
    reader.skip(Part.VISION)
    weights = prepare_weights(config, reader, hashes, compressed_ids, precision)
    reader.finish()
    return weights


def prepare_weights(
    config: ModelConfig,
    reader: TensorSource,
    hashes: Mapping[int, EngramHash],
    compressed_ids: Tensor | None,
    precision: Precision,
) -> BackboneWeights:
    """Weights from the tensors that `reader` hands out by name; `hashes` by Engram layer."""
    loader = _Loader(config, reader, keep_bytes=precision.keeps_bytes)
    return BackboneWeights(
        embed=reader.take("embed.weight"),
        layers=tuple(loader.layer(plan, hashes.get(plan.layer)) for plan in build_layer_map(config).layers),
        norm=loader.vector("norm.weight"),
        head=loader.bf16("head.weight"),
        compressed_ids=compressed_ids,
        draft=loader.draft(),
    )


class _Loader:
    """Builds the parts below a name prefix."""

    def __init__(self, config: ModelConfig, reader: TensorSource, *, keep_bytes: bool) -> None:
        self._config = config
        self._reader = reader
        self._keep_bytes = keep_bytes

    def vector(self, name: str) -> Tensor:
        return self._reader.take(name).to(torch.float32)

    def bf16(self, name: str) -> LinearWeight:
        return LinearWeight.from_bf16(self._reader.take(name), keep_bytes=self._keep_bytes)

    def fp8(self, name: str, *, groups: int = 1) -> LinearWeight:
        return LinearWeight.from_fp8(*self._pair(name), groups=groups, keep_bytes=self._keep_bytes)

    def layer(self, plan: LayerPlan, engram_hash: EngramHash | None) -> LayerWeights:
        return self._block(f"layers.{plan.layer}.", self._config.n_routed_experts, plan, engram_hash)

    def draft(self) -> DraftWeights | None:
        dspark = self._config.dspark
        if dspark is None:
            return None
        last = f"mtp.{dspark.num_blocks - 1}."
        return DraftWeights(
            blocks=tuple(
                self._block(f"mtp.{block}.", dspark.n_routed_experts, None, None) for block in range(dspark.num_blocks)
            ),
            main_proj=self.fp8("mtp.0.main_proj"),
            main_norm=self.vector("mtp.0.main_norm.weight"),
            norm=self.vector(f"{last}norm.weight"),
            markov_embed=self._reader.take(f"{last}markov_head.embed.weight"),
            markov_head=self.bf16(f"{last}markov_head.head.weight"),
            confidence=self.bf16(f"{last}confidence_head.proj.weight"),
        )

    def _block(
        self, prefix: str, num_experts: int, plan: LayerPlan | None, engram_hash: EngramHash | None
    ) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.vector(f"{prefix}attn_norm.weight"),
            ffn_norm=self.vector(f"{prefix}ffn_norm.weight"),
            hc_attn=self._hyper_connections(f"{prefix}hc_attn_"),
            hc_ffn=self._hyper_connections(f"{prefix}hc_ffn_"),
            attn=self._attention(f"{prefix}attn.", plan),
            ffn=self._moe(f"{prefix}ffn.", num_experts),
            engram=None if engram_hash is None else self._engram(f"{prefix}engram.", engram_hash),
        )

    def _hyper_connections(self, prefix: str) -> MixWeight:
        return MixWeight.prepare(
            self.vector(f"{prefix}fn"),
            self.vector(f"{prefix}scale"),
            self.vector(f"{prefix}base"),
            keep_bytes=self._keep_bytes,
        )

    def _attention(self, prefix: str, plan: LayerPlan | None) -> AttentionWeights:
        owns_kv = plan is not None and plan.owns_kv
        wq_b = self.fp8(f"{prefix}wq_b")
        if plan is not None and plan.has_indexer:
            wq_b = LinearWeight.concat([wq_b, self.fp8(f"{prefix}indexer.wq_b")])
        return AttentionWeights(
            wq_a_wkv=LinearWeight.concat([self.fp8(f"{prefix}wq_a"), self.fp8(f"{prefix}wkv")]),
            q_norm=self.vector(f"{prefix}q_norm.weight"),
            kv_norm=self.vector(f"{prefix}kv_norm.weight"),
            wq_b=wq_b,
            attn_sink=self.vector(f"{prefix}attn_sink"),
            wo_a=self.fp8(f"{prefix}wo_a", groups=self._config.o_groups),
            wo_b=self.fp8(f"{prefix}wo_b"),
            compress_index=self._compress_index(prefix, plan),
            compressor_norm=self.vector(f"{prefix}compressor.norm.weight") if owns_kv else None,
            index_key=IndexKeyWeights(
                wk=self.bf16(f"{prefix}indexer.wk.weight"), k_norm=self.vector(f"{prefix}indexer.k_norm.weight")
            )
            if owns_kv
            else None,
        )

    def _compress_index(self, prefix: str, plan: LayerPlan | None) -> LinearWeight | None:
        if plan is None or not plan.has_indexer:
            return None
        names = ["indexer.weights_proj"]
        if plan.owns_kv:
            names.insert(0, "compressor.wkv")
            if plan.ratio > 1:
                names.insert(0, "compressor.wgate")
        return LinearWeight.concat([self.bf16(f"{prefix}{name}.weight") for name in names])

    def _moe(self, prefix: str, num_experts: int) -> MoeWeights:
        w1, w3, w2 = (
            [self._pair(f"{prefix}experts.{expert}.{name}") for expert in range(num_experts)]
            for name in ("w1", "w3", "w2")
        )
        shared = [self._pair(f"{prefix}shared_experts.{name}") for name in ("w1", "w3", "w2")]
        return MoeWeights(
            gate=self.bf16(f"{prefix}gate.weight"),
            bias=self.vector(f"{prefix}gate.bias"),
            bias_vl=self.vector(f"{prefix}gate.bias_vl"),
            experts=ExpertWeights.from_fp4(w1, w3, w2, keep_bytes=self._keep_bytes),
            shared=ExpertWeights.from_fp8(*shared, keep_bytes=self._keep_bytes),
        )

    def _engram(self, prefix: str, engram_hash: EngramHash) -> EngramLayerWeights:
        return EngramLayerWeights(
            table=EngramTable(
                self._reader.take_mapped(f"{prefix}embed.weight"), self._reader.take_mapped(f"{prefix}embed.scale")
            ),
            multipliers=torch.from_numpy(engram_hash.multipliers),
            primes=torch.from_numpy(engram_hash.primes),
            offsets=torch.from_numpy(engram_hash.offsets),
            wkv=self.fp8(f"{prefix}wkv"),
            gate_weight=gate_weight(self._reader.take(f"{prefix}q_weight"), self._reader.take(f"{prefix}k_weight")),
        )

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._reader.take(f"{name}.weight"), self._reader.take(f"{name}.scale")
