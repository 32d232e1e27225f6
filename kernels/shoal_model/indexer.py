"""Which compressed entries a row attends to. Source: v41-flash.md section 7.4."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_kernels.ops import indexer
from shoal_kernels.paged_rows import PagedRows
from shoal_kernels.precision import Precision
from torch import Tensor

from shoal_model.config import ModelConfig
from shoal_model.layer_map import AttentionMode, LayerPlan
from shoal_model.rows import HalfPlan
from shoal_model.trace import Trace


@dataclass(frozen=True, slots=True)
class Selected:
    """The running selection of one half: layers that reuse take `topk`, layers that reindex look in `candidates`."""

    topk: Tensor  # int32 [rows, k], entry ids ascending, -1 padded
    candidates: Tensor | None  # int32 [rows, blocks], candidate block ids ascending, -1 padded


class Indexer:
    """Scores index keys and selects entries for one Full or Reindex layer."""

    def __init__(self, plan: LayerPlan, config: ModelConfig, precision: Precision, keys: PagedRows, scope: str) -> None:
        self._plan = plan
        self._config = config
        self._precision = precision
        self._keys = keys
        self._scope = scope

    def select(
        self,
        index_q: Tensor,
        weights: Tensor,
        half: HalfPlan,
        block_table: Tensor,
        before: Selected | None,
        trace: Trace,
    ) -> Selected:
        """The new selection for rows with index queries [rows, heads, dim] and head weights [rows, heads]."""
        c = self._config
        where = (self._keys, block_table, half.row_seq, half.num_visible[self._plan.ratio])
        trace.record(self._scope, "index_q", index_q)
        trace.record(self._scope, "index_weights", weights)
        candidates: Tensor | None
        if self._plan.is_candidate_source:
            topk, candidates = indexer.select_with_candidates(
                index_q,
                weights,
                *where,
                c.index_topk,
                num_blocks=c.candidate_topk_blocks,
                block_size=c.candidate_block_size,
                precision=self._precision,
            )
            trace.record(self._scope, "candidate_blocks", candidates)
        else:
            inside = before.candidates if before and self._plan.mode is AttentionMode.REINDEX else None
            candidates = before.candidates if before else None
            topk = indexer.select(
                index_q,
                weights,
                *where,
                c.index_topk,
                candidates=inside,
                candidate_block_size=c.candidate_block_size,
                precision=self._precision,
            )
        trace.record(self._scope, "topk", topk)
        return Selected(topk, candidates)
