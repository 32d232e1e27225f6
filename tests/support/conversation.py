"""Conversations in tokens: each turn's prompt is all that was said before and something new."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_client import Client
from support.asking import Question, Told, ask
from support.mesh import Mesh, wait_for


@dataclass(slots=True)
class Conversation:
    """Invariant: `said` is what the model has computed: prompts and answers so far, in order."""

    client: Client
    user_id: str
    max_tokens: int
    said: list[int] = field(default_factory=list)
    turns: list[Question] = field(default_factory=list)

    def turn(self, more: Sequence[int]) -> Told:
        """Say `more`; the answer joins what was said."""
        question = Question(
            prompt=(*self.said, *more), seed=len(self.turns), user_id=self.user_id, max_tokens=self.max_tokens
        )
        told = ask(self.client, question)
        self.turns.append(question)
        self.said = [*question.prompt, *told.tokens[0]]
        return told


def first_token_s(client: Client, question: Question) -> float:
    """Seconds from the call to the first tokens of a stream, which is read to its end."""
    began_s = time.perf_counter()
    first_s = 0.0
    for message in client.stream(question.generation()):
        if message.HasField("delta") and not first_s:
            first_s = time.perf_counter() - began_s
    return first_s


def wait_written(mesh: Mesh) -> None:
    """Until the workers have nothing left to store: nothing runs, and every queue to kv_cache is empty."""
    mesh.wait_idle()
    workers = [name for name in mesh.processes if name.startswith(("prefill_worker", "decode_worker"))]

    def waiting() -> dict[str, float]:
        return {name: waiting_bytes(mesh, name) for name in workers}

    wait_for(lambda: not any(waiting().values()), what=lambda: f"all stored, still waiting: {waiting()}")


def waiting_bytes(mesh: Mesh, name: str) -> float:
    """What a worker's gauge of bytes that are not stored yet says."""
    with urllib.request.urlopen(f"http://{mesh[name].admin}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if re.match(r"\w*kv_write_waiting_bytes(\{| )", line)]
    return float(value)
