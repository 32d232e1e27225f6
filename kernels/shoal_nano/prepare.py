"""Build what training reads: tokenizer.json, text tokens, the recipe's tools text. Run once, on any machine.

    python -m shoal_nano.prepare --stdlib /usr/lib/python3.11 --docs DIR/html/_sources --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal_nano.config import NanoConfig
from shoal_nano.prompt import ToolsTexts, render
from shoal_nano.tasks import FAMILIES, make_item
from shoal_nano.text import TextFile, read_text
from shoal_nano.tokenizer import BOS, train_tokenizer
from shoal_nano.tools_text import tools_texts

BPE_TEXT_CHARS = 6_000_000
BPE_ITEMS = 6_000


def bpe_corpus(files: list[TextFile], texts: ToolsTexts, rng: random.Random) -> Iterator[str]:
    """A sample of the text, and rendered items so that template words become single tokens."""
    shuffled = rng.sample(files, len(files))
    taken = 0
    for file in shuffled:
        if taken < BPE_TEXT_CHARS:
            taken += len(file.text)
            yield file.text[:60_000]
    for _ in range(BPE_ITEMS):
        item = make_item(rng.choice(FAMILIES), rng, held_out=False)
        yield from (text for is_special, text in render(item.dialogue, texts).segments if not is_special)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    files = list(read_text(arguments.stdlib, arguments.docs))
    texts = tools_texts()
    config = NanoConfig()
    trained_on = [file for file in files if not file.is_held_out]
    tokenizer = train_tokenizer(bpe_corpus(trained_on, texts, random.Random(0)), config.vocab_size)
    (out / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")))
    (out / "tools.json").write_text(json.dumps({"before": texts.before, "after": texts.after}))
    bos = tokenizer.token_to_id(BOS)
    for name, held_out in (("train", False), ("held_out", True)):
        chosen = [file.text for file in files if file.is_held_out == held_out]
        encoded = tokenizer.encode_batch(chosen, add_special_tokens=False)
        ids = np.concatenate([np.array([bos, *item.ids], np.uint16) for item in encoded])
        ids.tofile(out / f"{name}.u16")
        print(f"{name}: {len(chosen)} files, {sum(map(len, chosen))} characters, {len(ids)} tokens")


if __name__ == "__main__":
    main()
