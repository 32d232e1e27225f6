"""One answer in random deployment shapes, and the same stored bytes: on the golden tiny model and on nano."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from shoal_engine.llm import model_directory
from shoal_kernels.threads import get_num_threads, set_num_threads
from support.random_shapes import Shape, World
from support.seldom import seldom
from support.tiny_model import REPLAY, TINY


@cache
def tiny() -> World:
    lengths = (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 127, 128, 129, 151, 152, 255, 256, 280, 281, 384, 408)
    return World(TINY, REPLAY, lengths, outputs=(1, 2, 3, 5, 6, 12, 30, 90))


@cache
def nano() -> World:
    # Ratio 2, top-k 64, window 128, replay 140, 512 candidate entries, blocks.
    lengths = (1, 64, 65, 127, 128, 129, 139, 140, 141, 256, 267, 268, 396, 512, 513, 520, 640, 652, 1024, 1100)
    return World(model_directory("nano"), 140, lengths, outputs=(1, 2, 3, 6, 12, 40))


# Quick ones; 16 and 18 also bring back an answer that had ended, to a prompt of more than a block.
@pytest.mark.parametrize("seed", [5, 6, 10, 18, *seldom(2, 16, 20, 28)])
def test_tiny_says_and_stores_the_same(seed: int) -> None:
    Shape(tiny(), seed).run()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("world", "seeds"), [(tiny, range(100, 125)), (nano, range(12))], ids=["tiny", "nano"])
def test_both_models_say_and_store_the_same(world: Callable[[], World], seeds: range, threads: int) -> None:
    before = get_num_threads()
    set_num_threads(threads)
    try:
        for seed in seeds:
            Shape(world(), seed + 1000 * threads).run()
    finally:
        set_num_threads(before)
