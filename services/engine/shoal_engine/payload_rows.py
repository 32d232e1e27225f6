"""Logical rows as payloads of the KV transport, and back."""

from __future__ import annotations

from shoal.common.v1 import kv_transport_pb2 as pb
from shoal_common.errors import DataLoss
from shoal_common.kv_transport import PayloadSpec

from shoal_engine.logical_rows import LogicalRows, RowKind

PAYLOAD_KINDS: dict[RowKind, pb.PayloadKind.ValueType] = {
    RowKind.BLOCK: pb.PAYLOAD_KIND_BLOCK,
    RowKind.PARTIAL_BLOCK: pb.PAYLOAD_KIND_PARTIAL_BLOCK,
    RowKind.ENCODER_WINDOW: pb.PAYLOAD_KIND_ENCODER_WINDOW,
    RowKind.DECODER_WINDOW: pb.PAYLOAD_KIND_DECODER_WINDOW,
    RowKind.DRAFT_WINDOW: pb.PAYLOAD_KIND_DRAFT_WINDOW,
    RowKind.OPEN_PAIR: pb.PAYLOAD_KIND_OPEN_PAIR,
}
_ROW_KINDS = {kind: row_kind for row_kind, kind in PAYLOAD_KINDS.items()}


def spec_of(rows: LogicalRows, kv_id: str, block_hash: bytes = b"") -> PayloadSpec:
    """How rows are announced."""
    return PayloadSpec(
        kind=PAYLOAD_KINDS[rows.kind],
        position_begin=rows.position_begin,
        position_end=rows.position_end,
        shape=rows.shape,
        dtype=rows.dtype,
        kv_id=kv_id,
        block_hash=block_hash,
    )


def rows_of(payload: pb.Payload, data: bytes | memoryview, kv_id: str) -> LogicalRows:
    """Pulled bytes as rows. Raises DataLoss (FOREIGN_ROWS) for another layout or an unknown kind."""
    if payload.kv_id != kv_id or payload.kind not in _ROW_KINDS:
        raise DataLoss(
            f"rows of kind {payload.kind} and kv_id {payload.kv_id} cannot be loaded here",
            reason="FOREIGN_ROWS",
            kind=payload.kind,
            kv_id=payload.kv_id,
        )
    return LogicalRows(
        kind=_ROW_KINDS[payload.kind],
        position_begin=payload.position_begin,
        position_end=payload.position_end,
        shape=tuple(payload.shape),
        dtype=payload.dtype,
        data=data,
    )
