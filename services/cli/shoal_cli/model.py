"""`shoal model ...`: look at a checkpoint on this machine, without any service."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shoal_cli import model_calibrate, model_generate

if TYPE_CHECKING:
    from shoal_model.inspect import Amount, CheckpointReport, LayerReport

# argparse names no public type for it, and this one cannot be subscripted at run time.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

USAGE_ERROR = 2


def add_parser(subparsers: Subparsers) -> None:
    """Add the `model` command and its subcommands."""
    parser = subparsers.add_parser("model", help="look at a checkpoint")
    commands = parser.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_logits(commands)
    model_generate.add_parser(commands)
    model_calibrate.add_parser(commands)


def run(args: argparse.Namespace) -> int:
    """Run the parsed subcommand. Returns the exit status: 2 with one line on stderr for bad input."""
    try:
        status: int = args.run_model_command(args)
    except ValueError as error:
        print(f"shoal model {args.model_command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    return status


def _add_inspect(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "inspect",
        help="layers, formats and sizes",
        description="Layers, formats and sizes of a checkpoint, from its config.json and index; shards may be absent.",
    )
    parser.add_argument("directory", metavar="DIR", help='checkpoint folder, or "nano"')
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="size of the expert-parallel group")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_model_command=_inspect)


def _add_logits(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "logits",
        help="logits of a token sequence",
        description="Run a token sequence (replay off) and write its logits, float32 [tokens, vocabulary].",
    )
    parser.add_argument("directory", metavar="DIR", help='checkpoint folder, or "nano"')
    parser.add_argument("--ids", required=True, type=_token_ids, metavar="1,2,3", help="token ids, comma separated")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write (tensor `logits`)")
    parser.add_argument(
        "--numerics",
        choices=("exact", "kv", "served"),
        default="served",
        help="exact: float64, no casts; kv: float32, only the casts of the cache; served: every rounding of serving",
    )
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N", help="where to compute (default cpu)")
    parser.set_defaults(run_model_command=_logits)


def _directory(name: str) -> Path:
    """The folder that `nano` stands for, as in `generate`; any other name is a folder."""
    return Path(str(files("shoal_nano"))) / "release" if name == "nano" else Path(name)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma separated list of token ids") from None


def _logits(args: argparse.Namespace) -> int:
    from shoal_model.logits import write_sequence_logits

    logits = write_sequence_logits(_directory(args.directory), args.ids, args.out, args.numerics, device=args.device)
    print(f"{args.out}: logits {list(logits.shape)}, numerics {args.numerics}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from shoal_model.inspect import inspect_checkpoint

    report = inspect_checkpoint(_directory(args.directory), num_ranks=args.ranks)
    if args.json:
        print(json.dumps(report_as_json(report), indent=2))
    else:
        print("\n".join(report_as_lines(report)))
    return 0


def report_as_json(report: CheckpointReport) -> dict[str, object]:
    """The report as plain JSON values; sizes in bytes, layers in order."""
    rank, cache = report.rank, report.cache
    return {
        **_amount_as_json(report.total),
        "shards": report.num_shards,
        "shards_present": report.num_shards_present,
        "vocab_size": report.config.vocab_size,
        "max_position_embeddings": report.config.max_position_embeddings,
        "first_decoder_layer": report.config.boundary,
        "parts": {part.value: _amount_as_json(amount) for part, amount in report.parts.items()},
        "formats": {storage.value: _amount_as_json(amount) for storage, amount in report.formats.items()},
        "layers": [_layer_as_json(layer) for layer in report.layers],
        "draft_blocks": [_amount_as_json(amount) for amount in report.draft_blocks],
        "kv_bytes_per_token": float(cache.kv_bytes_per_token),
        "window_row_bytes": cache.window_row_bytes,
        "snapshot_bytes": cache.snapshot_bytes,
        "rank": {
            "ranks": rank.num_ranks,
            "experts": rank.num_experts,
            "draft_experts": rank.num_draft_experts,
            "expert_bytes": rank.expert_bytes,
            "engram_table_bytes": rank.engram_table_bytes,
            "replicated_bytes": rank.replicated_bytes,
            "bytes": rank.bytes,
        },
    }


def _amount_as_json(amount: Amount) -> dict[str, object]:
    return {"tensors": amount.tensors, "parameters": amount.parameters, "bytes": amount.bytes}


def _layer_as_json(layer: LayerReport) -> dict[str, object]:
    plan = layer.plan
    return {
        "layer": plan.layer,
        "side": "encoder" if plan.is_encoder else "decoder",
        "ratio": plan.ratio,
        "mode": plan.mode.value,
        "kv_source": plan.kv_source,
        "index_source": plan.index_source,
        "engram": plan.has_engram,
        "candidate_source": plan.is_candidate_source,
        "draft_target": plan.is_draft_target,
        **_amount_as_json(layer.amount),
    }


def report_as_lines(report: CheckpointReport) -> list[str]:
    """The report as text for a terminal."""
    config, cache, rank, total = report.config, report.cache, report.rank, report.total
    lines = [
        f"{total.tensors:,} tensors, {total.parameters:,} parameters, {_size(total.bytes)} ({total.bytes:,} bytes)",
        f"{report.num_shards} shards, {report.num_shards_present} here",
        f"vocabulary {config.vocab_size:,}, context {config.max_position_embeddings:,}, width {config.hidden_size}, "
        f"{config.num_hidden_layers} layers, {config.num_draft_blocks} draft blocks",
        f"cache: {float(cache.kv_bytes_per_token):g} bytes a token, snapshot {cache.snapshot_bytes:,} bytes "
        f"({config.boundary} encoder layers x {config.sliding_window} rows x {cache.window_row_bytes})",
        "",
    ]
    parts = [(part.value, amount) for part, amount in report.parts.items()]
    formats = [(storage.value, amount) for storage, amount in report.formats.items()]
    for title, rows in (("part", parts), ("format", formats)):
        lines += _table([title, "tensors", "parameters", "size"], [[name, *_cells(amount)] for name, amount in rows])
        lines.append("")
    lines += _table(
        ["layer", "side", "ratio", "mode", "kv from", "index from", "extras", "tensors", "parameters", "size"],
        [_layer_cells(layer) for layer in report.layers]
        + [[f"mtp.{i}", "draft", "0", "swa", "", "", "", *_cells(amt)] for i, amt in enumerate(report.draft_blocks)],
    )
    lines += [
        "",
        f"one rank of {rank.num_ranks}: {_size(rank.bytes)}",
        f"  replicated     {_size(rank.replicated_bytes)}",
        f"  experts        {_size(rank.expert_bytes)} ({rank.num_experts} of {config.n_routed_experts} a layer, "
        f"{rank.num_draft_experts} a draft block)",
        f"  engram tables  {_size(rank.engram_table_bytes)}",
    ]
    return lines


def _layer_cells(layer: LayerReport) -> list[str]:
    plan = layer.plan
    extras = {"engram": plan.has_engram, "candidates": plan.is_candidate_source, "draft target": plan.is_draft_target}
    return [
        str(plan.layer),
        "encoder" if plan.is_encoder else "decoder",
        str(plan.ratio),
        plan.mode.value,
        "" if plan.kv_source is None else str(plan.kv_source),
        "" if plan.index_source is None else str(plan.index_source),
        ", ".join(name for name, is_there in extras.items() if is_there),
        *_cells(layer.amount),
    ]


def _cells(amount: Amount) -> list[str]:
    return [f"{amount.tensors:,}", f"{amount.parameters:,}", _size(amount.bytes)]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns padded to their widest cell; the last three hold numbers and are aligned right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    left = len(header) - 3
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def _size(num_bytes: int) -> str:
    """Bytes for people, in powers of 1000 as disks and the index count them."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
