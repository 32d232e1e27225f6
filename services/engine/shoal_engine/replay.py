"""Bounded and warm replay: from where a prompt is run, and what its rows may see. Pure.

Source: mesh.md section 5, v41-flash.md section 8.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_engine.block_pool import BLOCK_TOKENS
from shoal_engine.errors import HitNotUsable
from shoal_engine.snapshots import snapshot_position


def default_replay_length(window: int, backtrack: int) -> int:
    """K where nothing else is asked for: the window and twice the backtrack, 140 at the released sizes."""
    return window + 2 * backtrack


def usable_hit(cached_tokens: int, prompt_length: int, replay_length: int) -> int:
    """Longest usable part of a cached prefix: a multiple of 128 that is <= Lp - K; 0 where there is none."""
    return min(cached_tokens // BLOCK_TOKENS * BLOCK_TOKENS, snapshot_position(prompt_length, replay_length))


def check_hit(hit: int, prompt_length: int, replay_length: int) -> None:
    """Raises HitNotUsable unless `hit` is usable as it is."""
    if hit < 0 or usable_hit(hit, prompt_length, replay_length) != hit:
        raise HitNotUsable(
            f"a hit of {hit} tokens is not usable for a prompt of {prompt_length}: it must be a multiple of "
            f"{BLOCK_TOKENS} and leave {replay_length} tokens",
            hit_tokens=hit,
            prompt_tokens=prompt_length,
            replay_tokens=replay_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """How one prompt is run. Rows are positions run_start .. Lp - 1.

    run_start        first row
    encoder_start    window keys of encoder layers below it are invisible
    entry_start      no compressed entry of a position below it is stored: the loaded blocks hold it
    decoder_start    rows from here on run the decoder half; also the lowest position with a decoder window key
    """

    run_start: int
    encoder_start: int
    entry_start: int
    decoder_start: int


def plan_prompt(
    prompt_length: int, hit: int, has_snapshot: bool, *, replay_length: int, encoder_layers: int, window: int
) -> PromptRun:
    """Run a prompt of which the blocks of [0, hit) are loaded, with or without the window snapshot at `hit`.

    Without it the encoder runs from E * W tokens before the hit (warm replay): after E layers nothing of what was
    invisible before can reach the window that ends at the hit, so those rows are exact.
    raises   HitNotUsable
    """
    check_hit(hit, prompt_length, replay_length)
    start = hit if has_snapshot else max(0, hit - encoder_layers * window)
    return PromptRun(
        run_start=start,
        encoder_start=0 if has_snapshot else start,
        entry_start=hit,
        decoder_start=max(0, prompt_length - replay_length),
    )


def recovery_decoder_start(last_position: int, *, decoder_layers: int, window: int) -> int:
    """First position whose decoder rows `last_position` and later rows can depend on, when emitted tokens are rerun.

    One decoder layer looks back W - 1 positions, so D layers look back D * (W - 1).
    """
    return max(0, last_position - decoder_layers * (window - 1))
