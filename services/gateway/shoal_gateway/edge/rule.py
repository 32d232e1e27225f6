"""Whether keys are asked for. Pure."""

from __future__ import annotations

import ipaddress
from typing import Literal

Auth = Literal["auto", "required", "off"]


def is_loopback(address: str) -> bool:
    """Only this machine reaches HOST:PORT. A name other than localhost may mean anything."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def asks_for_keys(auth: Auth, *, has_keys: bool, addresses: dict[str, str]) -> bool:
    """Whether a caller needs a key.

    addresses   where callers come in, by the name of the setting
    Raises ValueError with one line for operators where strangers could come in unasked, or settings contradict.
    """
    if auth == "off":
        if has_keys:
            raise ValueError("SHOAL_GATEWAY_AUTH is off, but there are API keys; unset one of them")
        return False
    if has_keys:
        return True
    if auth == "required":
        raise ValueError("SHOAL_GATEWAY_AUTH is required, but there are no API keys; set SHOAL_GATEWAY_API_KEYS_FILE")
    for name, address in addresses.items():
        if not is_loopback(address):
            raise ValueError(
                f"{name} is {address}, which others can reach, and there are no API keys: set"
                " SHOAL_GATEWAY_API_KEYS_FILE (`shoal key new` makes keys), or SHOAL_GATEWAY_AUTH=off to serve anyone"
            )
    return False
