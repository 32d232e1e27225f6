"""Flags that the commands of the local mesh share, each with its environment twin."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from shoal_cli.stack_spec import StackOptions
from shoal_cli.stack_state import default_run_dir


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """--mesh and --run-dir: which local mesh is meant."""
    parser.add_argument("--mesh", help="name of the mesh (also SHOAL_MESH; local)")
    parser.add_argument("--run-dir", type=Path, help="folder of its state and logs (also SHOAL_CLI_RUN_DIR)")


def add_stack_flags(parser: argparse.ArgumentParser) -> None:
    """What `run` and `up` start."""
    add_mesh_flags(parser)
    defaults = StackOptions()
    parser.add_argument("--http", help=f"HTTP address of the gateway ({defaults.http_address})")
    parser.add_argument("--grpc", help=f"gRPC address of the gateway ({defaults.grpc_address})")
    parser.add_argument("--model", type=Path, help="checkpoint folder (the nano model that comes with shoal)")
    parser.add_argument("--ready-timeout", type=float, default=defaults.ready_timeout_s, metavar="SECONDS")


def environment() -> Mapping[str, str]:
    """The environment of the command: read here and nowhere else."""
    return os.environ


def mesh_of(args: argparse.Namespace) -> str:
    """The name of the mesh that is meant."""
    return args.mesh or environment().get("SHOAL_MESH") or StackOptions().mesh


def run_dir_of(args: argparse.Namespace) -> Path:
    """The folder of its state and logs."""
    return args.run_dir or default_run_dir(environment(), mesh_of(args))


def options_of(args: argparse.Namespace) -> StackOptions:
    """The options that flags and environment make."""
    defaults, environ = StackOptions(), environment()
    return StackOptions(
        mesh=mesh_of(args),
        http_address=args.http or environ.get("SHOAL_GATEWAY_HTTP_ADDRESS") or defaults.http_address,
        grpc_address=args.grpc or environ.get("SHOAL_GATEWAY_LISTEN_ADDRESS") or defaults.grpc_address,
        model=args.model,
        ready_timeout_s=args.ready_timeout,
    )
