"""Block layout and block bytes, against the released sizes and an independent reading of the bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_kernels.precision import EXACT, SERVED
from shoal_kernels.row_formats import index_format, main_format
from shoal_model.kv_layout import KvLayout
from shoal_model.pages import PagedCache

RELEASED_OWNERS = [(2, 2), (8, 2), (14, 2), (20, 1)]


def released() -> KvLayout:
    return KvLayout.build(RELEASED_OWNERS, main_format(512, SERVED), index_format(128, SERVED))


def small_cache(num_blocks: int = 4) -> PagedCache:
    main, index = main_format(64, SERVED), index_format(64, SERVED)
    return PagedCache(KvLayout.build([(2, 2), (6, 1)], main, index), main, index, num_blocks=num_blocks)


def test_a_released_block_is_890_bytes_a_token() -> None:
    assert released().block_bytes == 113_920 == 890 * 128


def test_released_sections_follow_each_other_as_index_then_main() -> None:
    sections = [(o.layer, o.index.offset, o.main.offset) for o in released().owners]
    assert sections == [(2, 0, 4352), (8, 22784, 27136), (14, 45568, 49920), (20, 68352, 77056)]


def test_only_complete_groups_count_as_entries() -> None:
    layout = released()
    assert layout.entries_bytes(128) == 113_920
    assert layout.entries_bytes(3) == 3 * (68 + 288) + 3 * (68 + 288)
    assert layout.entries_bytes(1) == 68 + 288


def test_a_ratio_that_does_not_divide_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="ratio 3"):
        KvLayout.build([(2, 3)], main_format(64, SERVED), index_format(64, SERVED))


def test_a_block_round_trips_as_bytes() -> None:
    cache, data = small_cache(), np.random.default_rng(1).bytes(small_cache().layout.block_bytes)
    cache.write_block(2, data)
    assert cache.read_block(2) == data
    assert cache.read_block(1) == bytes(len(data))


def test_entries_read_from_a_block_are_its_logical_rows() -> None:
    cache = small_cache()
    data = np.random.default_rng(2).bytes(cache.layout.block_bytes)
    cache.write_block(1, data)
    raw = np.frombuffer(data, dtype=np.uint8)
    rows = []
    for owner, count in zip(cache.layout.owners, (2, 5), strict=True):
        section = owner.index
        keys = raw[section.offset :][: section.num_entries * 32].reshape(-1, 32)
        scales = raw[section.offset + section.num_entries * 32 :][: section.num_entries * 2].reshape(-1, 2)
        rows += [np.concatenate([keys[:count], scales[:count]], axis=1).tobytes()]
        rows += [raw[owner.main.offset :][: count * 36].tobytes()]
    assert cache.read_entries(1, 5) == b"".join(rows)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 77, 128])
def test_entries_move_between_blocks(num_tokens: int) -> None:
    cache = small_cache()
    cache.write_block(1, np.random.default_rng(3).bytes(cache.layout.block_bytes))
    entries = cache.read_entries(1, num_tokens)
    assert len(entries) == cache.layout.entries_bytes(num_tokens)
    cache.write_entries(3, num_tokens, entries)
    assert cache.read_entries(3, num_tokens) == entries
    if num_tokens == 128:
        assert cache.read_block(3) == cache.read_block(1)


def test_uncast_blocks_round_trip_too() -> None:
    main, index = main_format(8, EXACT), index_format(4, EXACT)
    cache = PagedCache(KvLayout.build([(2, 2)], main, index), main, index, num_blocks=3)
    values = torch.randn(64, 8, dtype=torch.float64)
    cache.main(2).write(torch.full((64,), 1), torch.arange(64), values)
    cache.write_block(2, cache.read_block(1))
    assert torch.equal(cache.main(2).read(torch.full((64,), 2), torch.arange(64)), values)


@pytest.mark.parametrize("block_id", [0, 4, -1])
def test_the_null_block_and_unknown_blocks_are_refused(block_id: int) -> None:
    with pytest.raises(ValueError, match="block id"):
        small_cache().read_block(block_id)


def test_payloads_of_a_wrong_length_are_refused_and_change_nothing() -> None:
    cache = small_cache()
    with pytest.raises(ValueError, match="bytes expected"):
        cache.write_block(1, b"short")
    with pytest.raises(ValueError, match="bytes expected"):
        cache.write_entries(1, 4, b"short")
    assert cache.read_block(1) == bytes(cache.layout.block_bytes)
