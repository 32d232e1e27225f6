"""The model's tokenizer as the grammar engine needs it: the bytes of every token, and which tokens are no text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llguidance import LLTokenizer

_NAME = "\ufdd0{}\ufdd1"
"""Noncharacters of Unicode."""
_TEXTS = ("[a-z ]", "[a-zA-Z ]", "[a-zA-Z0-9_]")
"""Characters of texts that constraints often let through, beside those of strings in JSON, which the engine knows."""
SLICES = (*LLTokenizer.json_slices(), *(f"{chars}{{1,{count}}}" for chars in _TEXTS for count in (10, 30)))
"""Expressions for tokens that a mask allows all at once, without a look at each, where a text may go on by any of them.
They change no mask. Those of _TEXTS together cost 1 - 2 µs a mask, 40 MB and 0.15 s at the start at 129,280 ids."""


class GrammarTokenizer:
    """Built once per model. Added tokens never count as text: no string or free text of a constraint contains one.

    vocab_size   of the model; masks have one bit for each. Ids without a token are never allowed
    special_ids  ids of the added tokens by their content
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_id: int) -> None:
        """Of a tokenizer.json (byte-level BPE). Raises ValueError for one that does not fit the vocabulary."""
        described: dict[str, Any] = json.loads(tokenizer_json)
        added = described.get("added_tokens", [])
        vocab: dict[str, int] = described.get("model", {}).get("vocab", {})
        self.vocab_size, self.eos_id = vocab_size, eos_id
        self.special_ids: Mapping[str, int] = MappingProxyType({token["content"]: token["id"] for token in added})
        for token in added:
            # Releases mark only some of them; the text of `</think>` must not pass for the token either way.
            token["special"] = True
            # Nor must the engine, where a grammar leaves one text only, spell it by the token: no text has this name.
            name = _NAME.format(token["id"])
            if vocab.pop(token["content"], None) is not None:
                vocab[name] = token["id"]
            token["content"] = name
        self.engine = LLTokenizer(json.dumps(described), n_vocab=vocab_size, eos_token=eos_id, slices=[*SLICES])
        if self.engine.vocab_size != vocab_size:
            raise ValueError(f"the tokenizer has {self.engine.vocab_size} tokens, the model {vocab_size}")

    @classmethod
    def from_file(cls, path: str | Path, *, vocab_size: int, eos_id: int) -> GrammarTokenizer:
        """Of a file; about a second for 129,280 tokens."""
        return cls(Path(path).read_text(encoding="utf-8"), vocab_size=vocab_size, eos_id=eos_id)

    @property
    def mask_words(self) -> int:
        """int32 words of a mask."""
        return -(-self.vocab_size // 32)
