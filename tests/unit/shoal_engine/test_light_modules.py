"""What a process without torch may import: events and requests of the engine, and its pure parts."""

import subprocess
import sys

LIGHT = [
    "acceptance",
    "admission",
    "batcher",
    "block_pool",
    "commands",
    "core",
    "errors",
    "events",
    "logical_rows",
    "planner",
    "replay",
    "request_states",
    "requests",
    "sequence",
    "snapshots",
    "step",
    "state_slots",
]


def test_the_pure_modules_load_no_torch_grpc_or_nats() -> None:
    imports = ", ".join(f"shoal_engine.{name}" for name in LIGHT)
    script = f"import sys, {imports}; print([m for m in ('torch', 'grpc', 'nats') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
