"""The NATS of the local mesh: ours from the wheel, or the user's by SHOAL_NATS_URL."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from shoal_common.bus import OFF
from shoal_common.settings import without_credentials

from shoal_cli.child import Child
from shoal_cli.errors import CliError
from shoal_cli.stack_spec import ProcessSpec

_REACH_TIMEOUT_S = 3.0
_POLL_S = 0.02
_CONFIG = """\
listen: "127.0.0.1:-1"
ports_file_dir: {folder}
jetstream {{ store_dir: {folder}, max_mem: 128MB, max_file: 1MB }}
"""


async def start(run_dir: Path, environ: Mapping[str, str], *, timeout_s: float) -> tuple[Child, str]:
    """Start a server on a free port of the loopback. Returns it and its URL. Raises CliError."""
    folder = run_dir / "nats"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "server.conf"
    config.write_text(_CONFIG.format(folder=json.dumps(str(folder))), encoding="utf-8")
    spec = ProcessSpec(name="nats", command=(_binary(), "-c", str(config)), environment=environ)
    child = await Child.start(spec, run_dir / "logs")
    try:
        url = await asyncio.wait_for(_url(child, folder), timeout_s)
    except TimeoutError:
        await child.stop(1.0)
        raise CliError(f"nats did not open its port within {timeout_s:g} s") from None
    except BaseException:
        await child.stop(1.0)
        raise
    return child, url


async def reach(url: str) -> None:
    """Check that somebody listens at the user's URL. Raises CliError."""
    if url == OFF:
        raise CliError("SHOAL_NATS_URL=off is for a worker that stands alone; a mesh needs NATS")
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port or 4222
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _REACH_TIMEOUT_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise CliError(
            f"NATS cannot be reached at SHOAL_NATS_URL={without_credentials(url)}: {error or 'no answer'}"
        ) from error
    writer.close()


def _binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise CliError("nats-server not found: install shoal[local], or set SHOAL_NATS_URL")
    return found


async def _url(child: Child, folder: Path) -> str:
    ended = asyncio.create_task(child.ended())
    try:
        while not ended.done():
            if (url := _written_url(folder)) is not None:
                return url
            await asyncio.sleep(_POLL_S)
    finally:
        ended.cancel()
    raise CliError(f"nats did not start: {child.last_words()}")


def _written_url(folder: Path) -> str | None:
    """What the server wrote about its ports; None while it has not, or only half."""
    for ports in folder.glob("*.ports"):
        try:
            return str(json.loads(ports.read_text(encoding="utf-8"))["nats"][0])
        except ValueError:
            return None
    return None
