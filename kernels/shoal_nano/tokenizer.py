"""Nano's byte-level BPE: V4.1's special tokens by their exact spelling, digits one by one."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
LATEST_REMINDER, IMAGE = "<｜latest_reminder｜>", "<｜deepseek_image｜>"

# The first ids: what a text model meets. bos, eos and pad must be 0, 1, 2.
LEADING = (BOS, EOS, PAD, USER, ASSISTANT, THINK, END_THINK, DSML, SYSTEM, LATEST_REMINDER)
# The last ids: tokens that nano's training never shows.
TRAILING = (
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
    "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
    IMAGE,
)  # fmt: skip


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the BPE on `texts` so that base entries and special tokens together number `vocab_size`.

    Raises ValueError if the texts are too few to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TRAILING),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in LEADING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in TRAILING])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts fill {tokenizer.get_vocab_size()} of {vocab_size} vocabulary entries")
    return tokenizer


def compressed_ids(tokenizer: Tokenizer) -> list[int]:
    """Engram's compressed id of every token id, in order of first appearance.

    source  v41-flash.md section 6.1
    """
    pipeline = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), "\ue000"),
            normalizers.Strip(), normalizers.Replace("\ue000", " "),
        ]
    )  # fmt: skip
    seen: dict[str, int] = {}
    result = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = tokenizer.id_to_token(token_id) if "\ufffd" in text else pipeline.normalize_str(text) or text
        result.append(seen.setdefault(key, len(seen)))
    return result
