"""One question, its answer printed as it comes."""

from __future__ import annotations

import sys
from typing import TextIO

from shoal_client import AioClient, Prompt, SamplingParams, ShoalError, Usage, generation

from shoal_cli.errors import CliError

_TIMEOUT_S = 300.0


async def ask(
    address: str,
    prompt: Prompt,
    *,
    model: str = "",
    sampling: SamplingParams | None = None,
    api_key: str | None = None,
    out: TextIO | None = None,
) -> tuple[str, Usage]:
    """Stream the answer to `out` (standard output if None); returns its text and usage. Raises CliError.

    Reasoning is shown dimmed on a terminal, but is not part of the text returned.
    """
    out = out or sys.stdout
    dim, plain = ("\x1b[2m", "\x1b[0m") if out.isatty() else ("", "")
    text, usage = "", Usage()
    try:
        async with AioClient(address, api_key=api_key) as client:
            async for event in client.stream(generation(prompt, model=model, sampling=sampling), timeout_s=_TIMEOUT_S):
                delta = event.finish.output if event.HasField("finish") else event.delta
                if delta.reasoning_text:
                    print(f"{dim}{delta.reasoning_text}{plain}", end="", file=out, flush=True)
                if delta.text:
                    print(delta.text, end="", file=out, flush=True)
                    text += delta.text
                if event.HasField("tail"):
                    usage = event.tail.usage
    except ShoalError as error:
        raise CliError(f"no answer: {error.message} ({error.reason or error.code})") from error
    print(file=out, flush=True)
    return text, usage
