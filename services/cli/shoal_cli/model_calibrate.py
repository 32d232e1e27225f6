"""`shoal model calibrate`: fit the confidences of a draft head to what was accepted. Needs no model and no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

# argparse names no public type for it, and this one cannot be subscripted at run time.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(commands: Subparsers) -> None:
    """Add `calibrate` to the subcommands of `shoal model`."""
    parser = commands.add_parser(
        "calibrate",
        help="fit draft confidences to logged rounds",
        description="Fit a calibration to draft rounds that a decode worker logged (SHOAL_DECODE_WORKER_ROUND_LOG), "
        "for each mode of sampling with enough rounds.",
    )
    parser.add_argument("rounds", metavar="ROUNDS", type=Path, help="log of draft rounds")
    parser.add_argument("--out", required=True, metavar="FILE", type=Path, help="calibration file to write")
    parser.add_argument("--least-rounds", type=int, default=500, metavar="N", help="of a mode (default 500)")
    parser.set_defaults(run_model_command=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from shoal_engine.verify.calibration import ModeCalibration
    from shoal_engine.verify.fit import cumulative_errors, fit
    from shoal_engine.verify.rounds import read_rounds

    if args.least_rounds < 1:
        raise ValueError(f"--least-rounds must be positive, got {args.least_rounds}")
    try:
        logged = read_rounds(args.rounds)
    except OSError as error:
        raise ValueError(f"{args.rounds}: {error.strerror or error}") from error
    calibration = fit(logged, least_rounds=args.least_rounds)
    try:
        args.out.write_text(calibration.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{args.out}: {error.strerror or error}") from error
    print(f"{args.out}: draft {calibration.draft_id}, {calibration.width} draft positions")
    for mode, rounds in logged.modes.items():
        if mode not in calibration.modes:
            print(f"{mode.value}: only {len(rounds)} rounds, not fitted")
            continue
        raw = ModeCalibration.none(logged.width).confidences(rounds.logits, rounds.margins)
        before, after = cumulative_errors(raw, rounds.accepted), calibration.modes[mode].errors
        print(f"{mode.value}: {len(rounds)} rounds, calibration error by position, before and after (held out)")
        print("  " + "  ".join(f"{100 * b:.1f} -> {100 * a:.1f} %" for b, a in zip(before, after, strict=True)))
    return 0
