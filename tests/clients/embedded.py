"""A program of somebody who embeds the gRPC client: asks by text and by tokens, whole and streamed, blocking and async.

Run with ADDRESS; writes one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

from shoal_client import AioClient, Client, InvalidRequest, Prompt, SamplingParams, Text, generation

PROMPTS: dict[str, Prompt] = {"talk": "Hello", "text": Text("def add(a, b):"), "tokens": [0, 40, 41, 42]}
SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=3)


def joined(events: Iterable[Any]) -> list[Any]:
    """Text and tokens of a stream's events."""
    text = ""
    ids: list[int] = []
    for event in events:
        for piece in (event.delta, event.finish.output):
            text += piece.reasoning_text + piece.text
            ids += piece.tokens.ids
    return [text, ids]


def whole(answer: Any) -> list[Any]:
    """Text and tokens of a whole answer."""
    output = answer.choices[0].output
    return [output.reasoning_text + output.text, list(output.tokens.ids)]


async def asked_async(address: str) -> dict[str, Any]:
    async with AioClient(address, timeout_s=60) as client:
        made: dict[str, Any] = {}
        for name, prompt in PROMPTS.items():
            wanted = generation(prompt, sampling=SAMPLING)
            made[f"async whole {name}"] = whole(await client.generate(wanted))
            made[f"async stream {name}"] = joined([event async for event in client.stream(wanted)])
        return made


def main(address: str) -> None:
    said: dict[str, Any] = {}
    with Client(address, timeout_s=60) as client:
        for name, prompt in PROMPTS.items():
            wanted = generation(prompt, sampling=SAMPLING)
            said[f"whole {name}"] = whole(client.generate(wanted))
            said[f"stream {name}"] = joined(client.stream(wanted))
        said["models"] = sorted(model.id for model in client.models())
        try:
            client.generate(generation("Hello", n=99))
        except InvalidRequest as error:
            said["refused"] = error.reason
    said |= asyncio.run(asked_async(address))
    loaded = {name.partition(".")[0] for name in sys.modules}
    said["loaded"] = sorted(loaded - sys.stdlib_module_names)
    json.dump(said, sys.stdout)


main(sys.argv[1])
