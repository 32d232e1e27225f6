"""Blocks that generation made are named by prompt and output together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shoal_common.chains import HashChain
from shoal_common.kv_cache_client import CacheItem, CacheWriter
from shoal_decode_worker.core import ChoiceStart
from shoal_decode_worker.generation import GenerationStart, SamplingSpec
from shoal_decode_worker.write_back import StoredModel, WriteBack

ROOT = b"r" * 32
MODEL = StoredModel(kv_id="kv", numerics_id="n", encoder_layers=2, window=16)


class Taken(CacheWriter):
    """Keeps what is offered."""

    def __init__(self) -> None:
        self.items: list[CacheItem] = []

    def offer(self, items: Sequence[CacheItem], *, numerics_id: str, tenant_tag: bytes) -> int:
        self.items += items
        return len(items)


def start(root: bytes | None, *so_far: tuple[int, ...]) -> GenerationStart:
    return GenerationStart(
        request_id="r",
        attempt=1,
        gateway_id="",
        numerics_id=None,
        cache_root=root,
        tenant_tag=b"t",
        prompt_ids=array("I", range(200)),
        sampling=SamplingSpec(seed=1),
        choices=tuple(ChoiceStart(output_ids=one) for one in so_far),
    )


def test_each_choice_has_a_chain_of_its_own_behind_the_prompt() -> None:
    writer = Taken()
    back = WriteBack(writer)
    back.opened("r#1", start(ROOT, (), (7, 8)))
    back.tokens("r#1", 0, range(1000, 1060))
    back.tokens("r#1", 1, range(2000, 2060))
    back.blocks("r#1", None, 0, [b"p"], MODEL)
    back.blocks("r#1", 0, 1, [b"0"], MODEL)
    back.blocks("r#1", 1, 1, [b"1"], MODEL)
    first = HashChain(ROOT, [*range(200), *range(1000, 1060)])
    second = HashChain(ROOT, [*range(200), 7, 8, *range(2000, 2060)])
    hashes = [one.spec.block_hash for one in writer.items]
    assert hashes == [first.hashes[0], first.hashes[1], second.hashes[1]]


def test_a_snapshot_in_the_output_is_stored_under_its_choice() -> None:
    writer = Taken()
    back = WriteBack(writer)
    back.opened("r#1", start(ROOT, ()))
    back.tokens("r#1", 0, range(1000, 1060))
    back.snapshot("r#1", 0, 256, b"s" * (2 * 16 * 3), MODEL)
    (item,) = writer.items
    assert item.spec.block_hash == HashChain(ROOT, [*range(200), *range(1000, 1060)]).hashes[1]


def test_without_a_root_or_after_the_end_nothing_is_stored() -> None:
    writer = Taken()
    back = WriteBack(writer)
    back.opened("r#1", start(None, ()))
    back.blocks("r#1", None, 0, [b"p"], MODEL)
    back.opened("r#2", start(ROOT, ()))
    back.closed("r#2")
    back.closed("r#2")
    back.tokens("r#2", 0, [1])
    back.blocks("r#2", None, 0, [b"p"], MODEL)
    back.snapshot("r#2", None, 128, b"s", MODEL)
    assert writer.items == []
