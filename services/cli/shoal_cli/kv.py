"""`shoal kv stats|ls|flush|verify`: what the KV cache nodes hold, and getting rid of it."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shoal.kv_cache.v1 import kv_cache_service_pb2 as pb
from shoal_common.identity import HASH_BYTES, tenant_tag

from shoal_cli import kv_tables, stack_state
from shoal_cli.errors import CliError
from shoal_cli.kv_nodes import Answer, ask_all, live_nodes
from shoal_cli.stack_args import add_mesh_flags, environment, mesh_of, run_dir_of

if TYPE_CHECKING:
    from shoal.kv_cache.v1.kv_cache_service_pb2_grpc import KvCacheServiceAsyncStub

# argparse names no public type for it, and this one cannot be subscripted at run time.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
T = TypeVar("T")

_LOOK_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 120.0
_VERIFY_TIMEOUT_S = 24 * 3600.0
_TIERS = {"memory": pb.TIER_RAM, "disk": pb.TIER_SSD}


def add_parser(subparsers: Subparsers) -> None:
    """Adds `kv` and its subcommands."""
    parser = subparsers.add_parser("kv", help="look at the KV cache, flush it, check it")
    commands = parser.add_subparsers(dest="kv_command", required=True, metavar="COMMAND")
    _add(commands, "stats", _stats, "counts per node and tier")
    _add_filter(_add(commands, "ls", _ls, "what is held, summed by model, numerics and tenant"))
    flush = _add(commands, "flush", _flush, "drop blocks and snapshots from every tier of every node", _FLUSH_TIMEOUT_S)
    _add_filter(flush)
    flush.add_argument("--everything", action="store_true", help="all of it")
    verify = _add(commands, "verify", _verify, "read everything, check it, drop what is damaged", _VERIFY_TIMEOUT_S)
    verify.add_argument("--tier", action="append", choices=list(_TIERS), default=[], help="only this one")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if a node did not answer, or `verify` found damage."""
    state = stack_state.read(run_dir_of(args))
    nats_url = environment().get("SHOAL_NATS_URL") or (state.nats_url if state else "nats://127.0.0.1:4222")
    nodes = live_nodes(args.node, nats_url=nats_url, mesh=mesh_of(args))
    status: int = args.run_kv_command(args, nodes)
    return status


def _add(
    commands: Subparsers,
    name: str,
    command: Callable[[argparse.Namespace, Sequence[str]], int],
    text: str,
    timeout_s: float = _LOOK_TIMEOUT_S,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text}. Ends with status 1 if a node did not answer.")
    add_mesh_flags(parser)
    parser.add_argument("--node", action="append", default=[], metavar="HOST:PORT", help="this node (all that live)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--timeout", type=_seconds, default=timeout_s, metavar="SECONDS", help=f"for each node ({timeout_s:g})"
    )
    parser.set_defaults(run_kv_command=command)
    return parser


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-id", help="layout and weights, as a worker announces them")
    tenant = parser.add_mutually_exclusive_group()
    tenant.add_argument("--tenant", help="name of a tenant; needs SHOAL_CACHE_SECRET")
    tenant.add_argument("--tenant-tag", metavar="HEX", help="its tag, as `ls --json` shows it")


def _stats(args: argparse.Namespace, nodes: Sequence[str]) -> int:
    answers = ask_all(nodes, lambda stub: stub.GetStats(pb.GetStatsRequest(), timeout=args.timeout))
    good = _good(answers)
    if args.json:
        print(json.dumps([kv_tables.stats_as_json(*one) for one in good], indent=2))
    elif good:
        print(kv_tables.stats_table(good))
    return _complain(answers)


def _ls(args: argparse.Namespace, nodes: Sequence[str]) -> int:
    request = pb.ListGroupsRequest(kv_id=args.kv_id, tenant_tag=_tag(args))
    answers = ask_all(nodes, lambda stub: stub.ListGroups(request, timeout=args.timeout))
    good = _good(answers)
    if args.json:
        print(json.dumps([group for one in good for group in kv_tables.groups_as_json(*one)], indent=2))
    elif good:
        print(kv_tables.groups_table(good))
    return _complain(answers)


def _flush(args: argparse.Namespace, nodes: Sequence[str]) -> int:
    tag = _tag(args)
    if args.everything == (args.kv_id is not None or tag is not None):
        raise CliError("say what to flush: --kv-id, --tenant or --tenant-tag, or --everything, and not both")
    flush_id = secrets.token_hex(16)
    request = pb.FlushRequest(kv_id=args.kv_id, tenant_tag=tag, everything=args.everything, flush_id=flush_id)
    # Twice: what one node had sent on before it was flushed may have come to another that was flushed before.
    rounds = [ask_all(nodes, lambda stub: stub.Flush(request, timeout=args.timeout)) for _ in range(2)]
    totals = {
        name: sum(getattr(value, name) for answers in rounds for _, value in _good(answers))
        for name in ("block_count", "snapshot_count", "remote_count")
    }
    done, failed = _good(rounds[-1]), [one for one in rounds[-1] if one.value is None]
    if args.json:
        unreached = [{"address": one.address, "error": one.error} for one in failed]
        print(json.dumps({"flush_id": flush_id, "nodes": len(done), "unreached": unreached, **totals}, indent=2))
    else:
        print(
            f"dropped {totals['block_count']:,} blocks and {totals['snapshot_count']:,} snapshots on {len(done)}"
            f" of {len(nodes)} nodes, {totals['remote_count']:,} payloads of the remote store"
        )
    status = _complain(rounds[-1])
    if failed:
        later = "they hear of it from the others and flush before they serve" if done else "nothing is flushed"
        print(f"shoal: not flushed there: {later}", file=sys.stderr)
    return status


def _verify(args: argparse.Namespace, nodes: Sequence[str]) -> int:
    request = pb.VerifyRequest(tiers=[_TIERS[name] for name in args.tier])

    async def verify(stub: KvCacheServiceAsyncStub) -> dict[str, pb.VerifyResponse]:
        last: dict[str, pb.VerifyResponse] = {}
        async for progress in stub.Verify(request, timeout=args.timeout):
            if not progress.is_done:
                last[kv_tables.tier_name(progress.tier)] = progress
        return last

    answers = ask_all(nodes, verify)
    rows = [
        {
            "address": address,
            "tier": tier,
            "checked": one.checked_count,
            "checked_bytes": one.checked_bytes,
            "damaged": one.damaged_count,
        }
        for address, tiers in _good(answers)
        for tier, one in tiers.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            checked = kv_tables.size(float(str(row["checked_bytes"])))
            print(f"{row['address']} {row['tier']}: {row['checked']:,} read ({checked}), {row['damaged']:,} damaged")
    return max(_complain(answers), int(any(row["damaged"] for row in rows)))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _tag(args: argparse.Namespace) -> bytes | None:
    if args.tenant is not None:
        secret = environment().get("SHOAL_CACHE_SECRET")
        if not secret:
            raise CliError("--tenant needs SHOAL_CACHE_SECRET, the one that the gateways have; or give --tenant-tag")
        return tenant_tag(secret, tenant=args.tenant)
    if args.tenant_tag is None:
        return None
    try:
        tag = bytes.fromhex(args.tenant_tag)
    except ValueError:
        tag = b"?"
    if len(tag) not in (0, HASH_BYTES):
        raise CliError(f"--tenant-tag must be {2 * HASH_BYTES} hex digits, or empty for blocks without a tenant")
    return tag


def _good(answers: Sequence[Answer[T]]) -> list[tuple[str, T]]:
    return [(one.address, one.value) for one in answers if one.value is not None]


def _complain(answers: Sequence[Answer[T]]) -> int:
    failed = [one for one in answers if one.value is None]
    for one in failed:
        print(f"shoal: {one.address}: {one.error}", file=sys.stderr)
    return int(bool(failed))
