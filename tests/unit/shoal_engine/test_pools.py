"""Block and slot pools."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal_engine.block_pool import BlockPool, blocks_for
from shoal_engine.errors import OutOfBlocks, OutOfSlots
from shoal_engine.state_slots import SlotPool


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("arf"), st.integers(0, 6)), max_size=60))
def test_free_and_referenced_blocks_partition_the_pool(count: int, operations: list[tuple[str, int]]) -> None:
    pool, tables = BlockPool(count), []
    for kind, number in operations:
        if kind == "a":
            if number <= pool.free_count:
                tables.append(pool.allocate(number))
            else:
                with pytest.raises(OutOfBlocks):
                    pool.allocate(number)
        elif tables and kind == "r":
            shared = tables[number % len(tables)]
            pool.retain(shared)
            tables.append(list(shared))
        elif tables:
            pool.release(tables.pop(number % len(tables)))
        held = [block for table in tables for block in table]
        assert all(pool.references(block) == held.count(block) for block in range(1, count + 1))
        assert pool.free_count == count - len(set(held))
        assert 0 not in held
    for table in tables:
        pool.release(table)
    assert sorted(pool.allocate(count)) == list(range(1, count + 1))


def test_released_blocks_are_reused_before_new_ones() -> None:
    pool = BlockPool(10)
    first = pool.allocate(3)
    pool.release(first)
    assert set(pool.allocate(3)) == set(first)


def test_releasing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.release([1])
    with pytest.raises(AssertionError):
        pool.retain([1])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2)])
def test_blocks_for_covers_every_position(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


@given(st.integers(1, 6), st.lists(st.integers(0, 7), max_size=30))
def test_slots_are_held_by_one_at_a_time(count: int, wants: list[int]) -> None:
    pool = SlotPool(count)
    held: list[int] = []
    for want in wants:
        if want > pool.free_count:
            with pytest.raises(OutOfSlots):
                pool.allocate(want)
            for slot in held:
                pool.release(slot)
            held = []
        else:
            held += pool.allocate(want)
        assert len(set(held)) == len(held) == count - pool.free_count


@pytest.mark.parametrize("pool", [BlockPool, SlotPool])
def test_an_empty_pool_cannot_be_made(pool: type) -> None:
    with pytest.raises(ValueError, match="positive"):
        pool(0)
