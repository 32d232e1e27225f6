from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support.nats_server import NatsServer

# Without a GPU the Triton kernels run in their interpreter. It is chosen before anything imports Triton.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The seed of a property comes from its test, so that a failure on one machine is one on all; a shared machine is slow.
hypothesis.settings.register_profile("shoal", derandomize=True, deadline=None)
hypothesis.settings.load_profile("shoal")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server of this test's own."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()
