"""What the cases of every client get: where the gateway under test is. They run in .venv-clients, without Shoal."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def http() -> str:
    """Base of the gateway's HTTP, without a path."""
    return os.environ["GATEWAY_HTTP"]
