"""Settings, model files, and what presence tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from shoal_common import identity
from shoal_common.presence import Presence
from shoal_gateway.config import GatewayConfig
from shoal_gateway.prefix_chains import MAX_PAIRS, PrefixChains
from shoal_gateway.served_model import BadModelFiles, read_served_model

TINY = Path(__file__).parents[2] / "golden" / "data" / "tiny"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_in_flight": 0}, "SHOAL_GATEWAY_MAX_IN_FLIGHT"),
        ({"keep_alive_s": 0.0}, "SHOAL_GATEWAY_KEEP_ALIVE_S"),
        ({"admission_s": 0.0}, "SHOAL_GATEWAY_ADMISSION_S"),
        ({"head_timeout_s": 0.0}, "SHOAL_GATEWAY_HEAD_TIMEOUT_S"),
        ({"http_address": "8000"}, "SHOAL_GATEWAY_HTTP_ADDRESS"),
        ({"http_address": "x:99999"}, "SHOAL_GATEWAY_HTTP_ADDRESS"),
        ({"model_name": ""}, "SHOAL_GATEWAY_MODEL_NAME"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        GatewayConfig(**change)  # type: ignore[arg-type]


def test_unusable_model_files_are_named(tmp_path: Path) -> None:
    def read() -> None:
        read_served_model(tmp_path, name="m", aliases=(), created_s=0)

    with pytest.raises(BadModelFiles, match=r"config\.json"):
        read()
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json"):
        read()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json"):
        read()
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 512}))
    with pytest.raises(BadModelFiles, match="eos_token_id 512"):
        read()


def worker(instance_id: str, pair: str) -> Presence:
    return Presence(
        instance_id=instance_id, role="decode_worker", address="h:1", kv_id=f"k{pair}", numerics_id=f"n{pair}"
    )


async def test_prompts_are_hashed_under_the_newest_live_pairs() -> None:
    chains = PrefixChains("secret")
    for number in range(MAX_PAIRS + 2):
        chains.announced(worker(f"w{number}", str(number)))
    chains.announced(worker("again", "0"))
    made = await chains.of_prompt(list(range(300)), tenant="", user_id="")
    assert [chain.numerics_id for chain in made] == ["n5", "n4", "n3", "n2"]
    chains.lapsed("w5")
    chains.lapsed("w0")
    made = await chains.of_prompt(list(range(300)), tenant="", user_id="")
    assert [chain.numerics_id for chain in made] == ["n4", "n3", "n2", "n1"]
    root = chains.root(kv_id="k4", numerics_id="n4", tenant="", user_id="")
    assert list(made[0].block_hashes) == identity.block_hashes(root, list(range(300)))
    assert len(made[0].block_hashes) == 2


async def test_two_users_and_two_secrets_share_no_hash() -> None:
    hashes = set()
    for secret in ("one", "other"):
        chains = PrefixChains(secret)
        chains.announced(worker("w", "0"))
        for user_id in ("", "ann", "bob"):
            (chain,) = await chains.of_prompt(list(range(128)), tenant="", user_id=user_id)
            hashes.add(chain.block_hashes[0])
    assert len(hashes) == 6
