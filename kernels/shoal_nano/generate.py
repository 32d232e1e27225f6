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


@torch.no_grad()
def generate(net: Net, w: Served, prompts: list[list[int]], max_tokens: int, sampling: Sampling, device: torch.device) -> list[Generated]:
    """Continue every prompt until EOS or `max_tokens`, then fill in the draft rounds."""
    if not prompts:
        return []
    sequences = [list(p) for p in prompts]
    sizes = [len(p) for p in prompts]
    open_rows = list(range(len(prompts)))
    vocab = net.config.vocab_size
    for index in range(max_tokens):
        ids, start, replay = _inputs([sequences[r] for r in open_rows], [sizes[r] for r in open_rows], device)
        out = net.forward(w, ids, start, replay, sparse=True)
        last = torch.tensor([len(sequences[r]) - 1 for r in open_rows], device=device)
        logits = net.logits(w, out.hidden[torch.arange(len(open_rows), device=device), last]).float()
        if sampling.temperature:
            noise = torch.stack([_noise(sampling, r, index, vocab, device) for r in open_rows])
            logits = logits / sampling.temperature + noise
        for row, token in zip(open_rows, logits.argmax(-1).tolist(), strict=True):
            sequences[row].append(token)
        open_rows = [r for r in open_rows if sequences[r][-1] != EOS_ID]
        if not open_rows:
            break
    results = []
    for row, sequence in enumerate(sequences):
        results.append(Generated(prompt=sequence[: sizes[row]], output=sequence[sizes[row] :], accepts=[]))
        results[-1].accepts = accept_lengths(net, w, results[-1], sampling, row, device)
    return results


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
