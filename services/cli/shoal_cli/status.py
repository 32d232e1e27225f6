"""`shoal status`: the live mesh as a table, as any member sees it on the bus."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

from shoal_common.bus import Bus
from shoal_common.load import LoadReport
from shoal_common.presence import HEARTBEAT_S, Presence
from shoal_common.settings import without_credentials
from shoal_common.watcher import Watcher

from shoal_cli import stack_state
from shoal_cli.errors import CliError
from shoal_cli.stack_args import add_mesh_flags, environment, mesh_of, run_dir_of

_CONNECT_TIMEOUT_S = 3.0
_HEADER = ("instance", "address", "state", "running", "waiting", "slots free", "KV used", "accepted")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status`."""
    parser = subparsers.add_parser("status", help="show the live instances and their load")
    add_mesh_flags(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if any instance lives, else 1."""
    state = stack_state.read(run_dir_of(args))
    url = environment().get("SHOAL_NATS_URL") or (state.nats_url if state else "nats://127.0.0.1:4222")
    fleet = asyncio.run(observe(url, mesh_of(args)))
    if args.json:
        print(json.dumps([_as_json(*one) for one in fleet], indent=2))
    else:
        print(table(fleet))
    return 0 if fleet else 1


async def observe(nats_url: str, mesh: str) -> list[tuple[Presence, LoadReport | None]]:
    """Listen for a heartbeat and a half. Raises CliError if NATS cannot be reached."""
    bus = Bus(nats_url, name="shoal status")
    await bus.start()
    try:
        if not await bus.wait_connected(_CONNECT_TIMEOUT_S):
            raise CliError(f"NATS cannot be reached at {without_credentials(nats_url)}; is the mesh up?")
        watcher = Watcher(bus, mesh=mesh, has_loads=True)
        await watcher.start()
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        fleet = [(one, watcher.load(one.instance_id)) for one in watcher.snapshot()]
        await watcher.stop()
        return fleet
    finally:
        await bus.close()


def table(fleet: Sequence[tuple[Presence, LoadReport | None]]) -> str:
    """The fleet for people; a dash where an instance does not report something."""
    rows = [_HEADER, *(_row(presence, load) for presence, load in fleet)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(presence: Presence, load: LoadReport | None) -> tuple[str, ...]:
    state = "draining" if presence.is_draining else "live"
    head = (presence.instance_id, presence.address, state)
    if load is None:
        return (*head, "-", "-", "-", "-", "-")
    return (
        *head,
        str(load.running),
        str(load.waiting),
        f"{load.free_slots}/{load.total_slots}" if load.total_slots else "-",
        f"{1 - load.free_blocks / load.total_blocks:.0%}" if load.total_blocks else "-",
        f"{load.accepted_tokens / load.draft_tokens:.0%}" if load.draft_tokens else "-",
    )


def _as_json(presence: Presence, load: LoadReport | None) -> dict[str, object]:
    report = None if load is None else {name: getattr(load, name) for name in LoadReport.__dataclass_fields__}
    return {**json.loads(presence.to_json()), "load": report}
