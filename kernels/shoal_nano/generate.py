"""Generation by recomputing whole sequences, and what DSpark would have accepted along the way.

Slow and simple: for scoring a checkpoint away from the engine. Numerics, bounded replay and selection are those of serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_nano.draft import draft_blocks, markov
from shoal_nano.net import Net, Served
from shoal_nano.noise import gumbel
from shoal_nano.stream import REPLAY_ROWS

EOS_ID, PAD_ID = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; else the coupled rule with one seed per sequence."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Generated:
    """prompt and output ids of one sequence; accepts: (accepted drafts, output tokens that were left) per draft round."""

    prompt: list[int]
    output: list[int]
    accepts: list[tuple[int, int]]


def _inputs(sequences: list[list[int]], prompts: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(map(len, sequences))
    length = longest + -longest % 8
    ids = torch.tensor([s + [PAD_ID] * (length - len(s)) for s in sequences])
    replay = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        bound = max(0, prompt - REPLAY_ROWS)
        replay[row, bound:] = bound
    return ids.to(device), torch.zeros_like(ids).to(device), replay.to(device)


def _noise(sampling: Sampling, row: int, position: int, vocab: int, device: torch.device) -> Tensor:
    return torch.from_numpy(gumbel(sampling.seed + row, position, vocab)).float().to(device)


def _pick(logits: Tensor, sampling: Sampling, row: int, position: int) -> int:
    if sampling.temperature:
        logits = logits.float() / sampling.temperature + _noise(sampling, row, position, logits.shape[-1], logits.device)
    return int(logits.argmax())


@torch.no_grad()
def generate(net: Net, w: Served, prompt: list[int], max_tokens: int, sampling: Sampling, device: torch.device, *, row: int = 0,
             guess: list[int] | None = None) -> Generated:  # fmt: skip
    """Continue a prompt until EOS or `max_tokens`, then fill in the draft rounds.

    Each pass verifies what was guessed (the reference answer first, DSpark's drafts after it), so the output is that of
    plain decoding, whatever the guesses are. `row` separates the noise of sequences under one seed.
    """
    tokens, pending = list(prompt), list(guess or [])[: max_tokens - 1]
    limit = len(prompt) + max_tokens
    while True:
        ids, start, replay = _inputs([tokens + pending], [len(prompt)], device)
        out = net.forward(w, ids, start, replay, sparse=True)
        rows = out.hidden[0, len(tokens) - 1 : len(tokens) + len(pending)]
        for logits, drafted in zip(net.logits(w, rows), [*pending, None], strict=True):
            tokens.append(_pick(logits, sampling, row, len(tokens) - len(prompt)))
            if tokens[-1] != drafted or tokens[-1] == EOS_ID or len(tokens) == limit:
                break
        if tokens[-1] == EOS_ID or len(tokens) == limit:
            break
        pending = _draft(net, w, out.features, replay, tokens, len(prompt), sampling, row)[: limit - len(tokens) - 1]
    done = Generated(prompt=prompt, output=tokens[len(prompt) :], accepts=[])
    done.accepts = accept_lengths(net, w, done, sampling, row, device)
    return done


def _draft(net: Net, w: Served, features: Tensor, replay: Tensor, tokens: list[int], prompt: int, sampling: Sampling, row: int) -> list[int]:
    """DSpark's proposal behind the last token, which the target has not seen yet."""
    anchor = torch.tensor([[len(tokens) - 2]], device=features.device)
    previous = torch.tensor([[tokens[-1]]], device=features.device)
    block = draft_blocks(net, w, features, anchor, previous, replay.gather(1, anchor))
    drafts: list[int] = []
    for k in range(net.config.dspark_block_size):
        logits, _ = markov(net, w, block.hidden[:, :, k], block.base[:, :, k], previous)
        drafts.append(_pick(logits[0, 0], sampling, row, len(tokens) + k - prompt))
        previous = torch.full_like(previous, drafts[-1])
    return drafts


@torch.no_grad()
def accept_lengths(net: Net, w: Served, done: Generated, sampling: Sampling, row: int, device: torch.device) -> list[tuple[int, int]]:
    """Walk the output as the decode loop would and count the drafts that equal it. Drafts past the end count as refused."""
    j = net.config.dspark_block_size
    tokens, prompt = done.prompt + done.output, len(done.prompt)
    if len(done.output) < 2:
        return []
    ids, start, replay = _inputs([tokens], [prompt], device)
    out = net.forward(w, ids, start, replay, sparse=True)
    anchors = torch.arange(prompt - 1, len(tokens) - 2, device=device)[None]
    previous = ids[0, anchors + 1]
    block = draft_blocks(net, w, out.features, anchors, previous, replay.gather(1, anchors))
    drafts = []
    for k in range(j):
        logits, _ = markov(net, w, block.hidden[:, :, k], block.base[:, :, k], previous)
        if sampling.temperature:
            # The draft for position P + 2 + k is output number P + 2 + k - prompt.
            noise = [_noise(sampling, row, p + 2 + k - prompt, net.config.vocab_size, device) for p in anchors[0].tolist()]
            logits = logits.float() / sampling.temperature + torch.stack(noise)
        previous = logits.argmax(-1)
        drafts.append(previous[0])
    table = torch.stack(drafts, -1).tolist()
    accepts, at = [], 0
    while at < len(table):
        wanted = done.output[at + 1 : at + 1 + j]
        count = next((k for k, (x, y) in enumerate(zip(table[at], wanted, strict=False)) if x != y), len(wanted))
        accepts.append((count, len(done.output) - at - 1))
        at += count + 1
    return accepts
