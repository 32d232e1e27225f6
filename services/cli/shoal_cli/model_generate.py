"""`shoal model generate`: continue one text with a checkpoint on this machine, without any service."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, TypeAlias

from shoal_common.errors import MeshError

if TYPE_CHECKING:
    from shoal_model.synthetic import Synthetic

# argparse names no public type for it, and this one cannot be subscripted at run time.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(commands: Subparsers) -> None:
    """Add `generate` to the subcommands of `shoal model`."""
    parser = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text as it stands, after the beginning-of-sequence token, and print the continuation.",
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help='checkpoint folder, or "nano"')
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--synthetic",
        choices=("released",),
        help="instead of DIR: random weights of this size, one rank's share; prints token ids",
    )
    parser.add_argument(
        "--layers", type=int, default=None, metavar="N", help="layers of a synthetic model (default 40)"
    )
    parser.add_argument("--ep-size", type=int, default=None, metavar="N", help="ranks that share it (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="its prompt's length (default 128)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="output tokens at most (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="same seed, same text (default: drawn)")
    parser.add_argument("--verify-width", type=int, default=5, metavar="0..5", help="drafts verified per step")
    parser.add_argument("--threads", type=int, default=None, metavar="N")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N", help="where to compute (default cpu)")
    parser.add_argument("--stats", action="store_true", help="print tokens, seed and accepted drafts to stderr")
    parser.set_defaults(run_model_command=_generate)


def _generate(args: argparse.Namespace) -> int:
    from shoal_engine.llm import LLM
    from shoal_engine.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
        )
        with LLM(
            args.directory or "",
            max_num_seqs=1,
            verify_width=args.verify_width,
            threads=args.threads,
            device=args.device,
            synthetic=_synthetic(args),
        ) as llm:
            prompt = args.prompt if args.synthetic is None else [_token_ids(args.prompt_tokens)]
            begin = time.perf_counter()
            (result,) = llm.generate(prompt, params, decode_sequence=False)
            taken_s = time.perf_counter() - begin
    except MeshError as error:
        # One line and exit status 2, as for every other bad input of `shoal model`.
        raise ValueError(error.message) from error
    print(result.outputs[0].text)
    if args.stats:
        usage = result.usage
        print(
            f"{usage.prompt_tokens} prompt tokens, {usage.output_tokens} output tokens, seed {result.seed}, "
            f"{usage.accepted_draft_tokens} of {usage.draft_tokens} drafts accepted in {usage.decode_steps} steps, "
            f"{taken_s:.2f} s",
            file=sys.stderr,
        )
    return 0


def _synthetic(args: argparse.Namespace) -> Synthetic | None:
    """The synthetic model that is asked for. ValueError unless it is either that, or a folder with a prompt."""
    from shoal_model.synthetic import Synthetic

    if args.synthetic is None:
        if args.directory is None or args.prompt is None:
            raise ValueError("needs DIR and --prompt, or --synthetic")
        if args.layers is not None or args.ep_size is not None:
            raise ValueError("--layers and --ep-size are of a --synthetic model")
        return None
    if args.prompt_tokens < 1:
        raise ValueError(f"--prompt-tokens must be positive, got {args.prompt_tokens}")
    if args.directory is not None or args.prompt is not None:
        raise ValueError("--synthetic takes neither DIR nor --prompt")
    given = {"num_layers": args.layers, "ep_size": args.ep_size}
    return Synthetic(sizes=args.synthetic, **{name: value for name, value in given.items() if value is not None})


def _token_ids(count: int) -> list[int]:
    """Some prompt of this length; a synthetic model has no text."""
    return [3 + i * 7919 % 100_000 for i in range(count)]
