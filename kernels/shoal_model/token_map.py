"""Engram's compressed token ids: tokens that read alike share one. Source: v41-flash specification, section 6.1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from shoal_model.config import ModelConfig
from shoal_model.errors import CheckpointError

_REPLACEMENT = "\ufffd"
_KEPT_SPACE = "\ue000"


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in `path`. Raises CheckpointError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise CheckpointError(path, f"is not a tokenizer: {error}") from error


def load_compressed_ids(directory: Path, config: ModelConfig) -> NDArray[np.int64]:
    """[vocab_size] int64: the compressed id of every token id, from `directory`/tokenizer.json.

    Raises CheckpointError if the tokenizer's ids are not 0 .. `vocab_size` - 1, or if the number of compressed ids is
    not `engram_compressed_vocab_size`: the hash multipliers depend on it, so the tables would be read at wrong rows.
    """
    assert config.engram is not None
    path = directory / "tokenizer.json"
    compressed = compress_ids(load_tokenizer(path), config.vocab_size, path)
    size, want = int(compressed.max()) + 1, config.engram.compressed_vocab_size
    if size != want:
        raise CheckpointError(path, f"gives {size} compressed ids, text_config.engram_compressed_vocab_size is {want}")
    return compressed


def compress_ids(tokenizer: Tokenizer, vocab_size: int, path: str | Path) -> NDArray[np.int64]:
    """[vocab_size] int64 compressed ids, numbered in order of first appearance. Raises CheckpointError about `path`."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size != vocab_size:
        raise CheckpointError(path, f"has {size} token ids, text_config.vocab_size is {vocab_size}")
    normalizer = _normalizer()
    compressed = np.empty(vocab_size, dtype=np.int64)
    id_of_key: dict[str, int] = {}
    for token_id in range(vocab_size):
        raw = tokenizer.id_to_token(token_id)
        if raw is None:
            raise CheckpointError(path, f"has no token with id {token_id}")
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # Part of a UTF-8 sequence has no text of its own: only its bytes, the raw token, tell it apart.
        key = raw if _REPLACEMENT in text else normalizer.normalize_str(text) or text
        compressed[token_id] = id_of_key.setdefault(key, len(id_of_key))
    return compressed


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            # A lone space is a token of its own and must outlive Strip.
            normalizers.Replace(Regex("^ $"), _KEPT_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_SPACE, " "),
        ]
    )
