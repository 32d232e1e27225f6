"""What a second turn costs: nano's time to first token with a prompt that kv_cache knows, against the first turn's."""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

from bench.harness import Bar, finish, percentile
from shoal_client import Client
from shoal_engine import LLM
from support.asking import Question, ask
from support.conversation import first_token_s, wait_written
from support.mesh import Mesh, mesh

CHATS = 12
WARM_UP = 2
PROMPT_TOKENS = 1_500
ANSWER_TOKENS = 48
MORE_TOKENS = 40
TEXT = "def harbour(lamp, stone):\n    return [river for river in lamp if river not in stone]\n\n\n" * 140


def text_ids(count: int) -> list[int]:
    """Python-like text in nano's tokens."""
    with LLM("nano", threads=1) as nano:
        ids: list[int] = nano.get_tokenizer().encode(TEXT).ids
    if len(ids) < count:
        raise ValueError(f"{count} tokens wanted, the text has {len(ids)}")
    return ids


def measure(running: Mesh, ids: list[int]) -> int:
    """Chats one after the other, each of another user, two turns each."""
    first: list[float] = []
    second: list[float] = []
    cached: list[int] = []
    with Client(running.grpc, timeout_s=120) as client:
        for chat in range(WARM_UP + CHATS):
            user_id = secrets.token_hex(8)
            opening = Question(prompt=tuple(ids[:PROMPT_TOKENS]), seed=chat, user_id=user_id, max_tokens=ANSWER_TOKENS)
            cold_s = first_token_s(client, opening)
            wait_written(running)
            # The answer again, to go on from: the same by the one promise, and mostly from the cache.
            answer = ask(client, opening).tokens[0]
            wait_written(running)
            more = ids[PROMPT_TOKENS : PROMPT_TOKENS + MORE_TOKENS]
            following = Question(
                prompt=(*opening.prompt, *answer, *more), seed=chat, user_id=user_id, max_tokens=ANSWER_TOKENS
            )
            warm_s = first_token_s(client, following)
            if chat >= WARM_UP:
                first.append(cold_s)
                second.append(warm_s)
                cached.append(ask(client, following).cached)
    ratio = percentile(second, 0.5) / percentile(first, 0.5)
    return finish(
        "kv_nano",
        workload={
            "chats": CHATS,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "new_tokens": MORE_TOKENS,
            "model": "nano",
        },
        bars=[Bar(name="second_turn_ttft", value=ratio, want=0.35, sense="at most", unit="of the first")],
        figures={
            "first_turn_ttft_p50_ms": percentile(first, 0.5) * 1e3,
            "second_turn_ttft_p50_ms": percentile(second, 0.5) * 1e3,
            "cached_tokens_p50": percentile(cached, 0.5),
        },
    )


def main() -> int:
    """A mesh of its own, measured."""
    settings = {name: {"MODEL": "nano"} for name in ("prefill_worker", "decode_worker")} | {"gateway": {"MODEL": ""}}
    ids = text_ids(PROMPT_TOKENS + MORE_TOKENS)
    with tempfile.TemporaryDirectory() as folder, mesh(Path(folder), settings) as running:
        return measure(running, ids)


if __name__ == "__main__":
    sys.exit(main())
