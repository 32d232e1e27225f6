"""Looks before anything is started whether the fixed addresses are free."""

from __future__ import annotations

import socket

from shoal_cli.errors import CliError


def check_free(address: str, flag: str) -> None:
    """Raises CliError if `address` cannot be listened on; `flag` is how to choose another."""
    host, _, port = address.rpartition(":")
    try:
        number = int(port)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), number))
    except ValueError as error:
        raise CliError(f"{flag} must be HOST:PORT, got {address!r}") from error
    except (OSError, OverflowError) as error:
        raise CliError(f"{address} is occupied or not ours ({error}); choose another with {flag}") from error
