"""What the gateway knows of the model it serves: names, limits, tokenizer. No weights are read."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from deepseek_recipe import Tokenizer

from shoal_gateway.refusals import ModelNotFound

_RELEASE = ("shoal_nano", "release")


class BadModelFiles(ValueError):
    """The model's files cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one name. Invariant: 0 <= eos_id, bos_id < vocab_size."""

    name: str
    aliases: tuple[str, ...]
    vocab_size: int
    max_context_tokens: int
    bos_id: int
    eos_id: int
    image_token: str
    created_s: int
    """When this gateway first offered it, Unix time."""

    def has_name(self, name: str) -> bool:
        """Requests may name this model so."""
        return name == self.name or name in self.aliases

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound unless requests may name this model so."""
        if not self.has_name(name):
            shown = name if len(name) <= 100 else name[:100] + "..."
            raise ModelNotFound(f"the model {shown!r} does not exist; {self.name} does", model=shown)


def packaged_model_dir() -> Path:
    """Where the model that comes with Shoal lies. Raises BadModelFiles if this install has none."""
    spec = importlib.util.find_spec(_RELEASE[0])
    for root in spec.submodule_search_locations or () if spec else ():
        found = Path(root) / _RELEASE[1]
        if (found / "config.json").exists():
            return found
    raise BadModelFiles("this install carries no model; set SHOAL_GATEWAY_MODEL")


def read_served_model(
    model_dir: Path, *, name: str, aliases: tuple[str, ...], created_s: int
) -> tuple[ServedModel, Tokenizer]:
    """Reads config.json and tokenizer.json of a model in the released layout. Raises BadModelFiles."""
    config_path, tokenizer_path = model_dir / "config.json", model_dir / "tokenizer.json"
    try:
        config = json.loads(config_path.read_bytes())
        text = config["text_config"]
        vocab_size, context = int(text["vocab_size"]), int(text["max_position_embeddings"])
        bos_id, eos_id = int(config["bos_token_id"]), int(config["eos_token_id"])
        image_id = int(config["image_token_id"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadModelFiles(f"{config_path} cannot be used: {error!r}") from error
    try:
        tokenizer_text = tokenizer_path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer_text)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadModelFiles(f"{tokenizer_path} cannot be used: {error}") from error
    if not (0 <= bos_id < vocab_size and 0 <= eos_id < vocab_size):
        raise BadModelFiles(f"{config_path}: bos_token_id {bos_id} or eos_token_id {eos_id} is not below {vocab_size}")
    model = ServedModel(
        name=name,
        aliases=aliases,
        vocab_size=vocab_size,
        max_context_tokens=context,
        bos_id=bos_id,
        eos_id=eos_id,
        image_token=_spelling(tokenizer_text, image_id),
        created_s=created_s,
    )
    return model, tokenizer


def _spelling(tokenizer_text: str, token_id: int) -> str:
    """How an added token is written. The released tokenizer's image placeholder differs from the recipe's default."""
    for added in json.loads(tokenizer_text).get("added_tokens", ()):
        if added.get("id") == token_id:
            return str(added["content"])
    return "<｜deepseek_image｜>"
