"""Train nano for a number of minutes, from nothing, a checkpoint or a release.

    python -m shoal_nano.train --data DIR --out DIR --minutes 9 --stage base
    python -m shoal_nano.train --data DIR --out DIR --minutes 9 --stage final --resume DIR

Stage `base` starts with every visible entry in sight while the indexer learns what the attention looks at;
from then on, and
in stage `final`, layers read the indexer's choice. All casts of serving are on from the first step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from shoal_nano import checkpoint
from shoal_nano.attention import FlexAttention, plain_attention
from shoal_nano.config import NanoConfig
from shoal_nano.losses import draft_loss, sample_anchors, token_loss
from shoal_nano.net import Net
from shoal_nano.ops import SERVED
from shoal_nano.optim import Optimiser
from shoal_nano.packing import Packed
from shoal_nano.released import read_release
from shoal_nano.stages import STAGES, Stage
from shoal_nano.stream import Corpus, Workers
from shoal_nano.tasks import CHECKED_FAMILIES
from shoal_nano.teacher import score_documents
from shoal_nano.tokenizer import IMAGE, SYSTEM, compressed_ids
from shoal_nano.weights import Parameters, initial_parameters

BALANCE_STEP = 1e-3
SAMPLED_ROWS = 128
LOG_EVERY = 50


def corpus_config(corpus: Corpus) -> tuple[NanoConfig, Tensor]:
    """Nano's configuration with the ids of this tokenizer, and Engram's compressed ids."""
    tokenizer = corpus.tokenizer
    compressed = compressed_ids(tokenizer)

    def id_of(token: str) -> int:
        found = tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token}")
        return found

    config = replace(
        NanoConfig(),
        vocab_size=tokenizer.get_vocab_size(),
        engram_compressed_vocab_size=max(compressed) + 1,
        dspark_noise_token_id=id_of(SYSTEM),
        image_token_id=id_of(IMAGE),
    )
    return config, torch.tensor(compressed)


@dataclass(slots=True)
class Trainer:
    """One run: parameters, optimiser, and the step over a packed batch."""

    net: Net
    parameters: Parameters
    optimiser: Optimiser
    stage: Stage
    device: torch.device
    num_anchors: int
    generator: torch.Generator
    tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def rate(self, progress: float, step: int) -> float:
        """Warm-up, a plateau, then a straight line down to the stage's last rate."""
        warm = min(1.0, (step + 1) / self.stage.warmup_steps)
        fall = max(0.0, (progress - self.stage.plateau) / (1 - self.stage.plateau))
        return warm * self.stage.rate * (1 - fall * (1 - self.stage.last_rate))

    def step(self, packed: Packed, progress: float, step: int) -> None:
        """One optimiser step."""
        stage = self.stage
        ids, start, replay = (
            torch.from_numpy(x).to(self.device, non_blocking=True).long()
            for x in (packed.ids, packed.start, packed.replay)
        )
        weight = torch.from_numpy(packed.weight).to(self.device, non_blocking=True)
        w = self.net.serve(self.parameters)
        rows = torch.randperm(ids.shape[1], generator=self.generator)[:SAMPLED_ROWS].sort().values.to(self.device)
        sparse, drafting = progress >= stage.sparse_from, progress >= stage.draft_from
        out = self.net.forward(w, ids, start, replay, sparse=sparse, sampled_rows=rows)
        loss, each = token_loss(self.net, w, out, ids, weight)
        total = loss + stage.index_weight * out.index_loss
        loads = {"layers": out.loads}
        if drafting:
            token_share = 0.1 + 0.9 * max(0.0, 1 - 1.5 * (progress - stage.draft_from) / (1 - stage.draft_from))
            anchors = sample_anchors(weight, self.num_anchors, self.net.config.dspark_block_size)
            # The head and the embedding are the target's: the draft must not move them.
            frozen = w | {name: [x.detach() for x in w[name]] for name in ("embed", "head")}
            draft = draft_loss(self.net, frozen, out, ids, weight, replay, anchors, token_share)
            total = total + draft.total
            loads["mtp"] = draft.loads
            self._note(draft=draft.total, length=draft.length, hits=draft.hits)
        torch.autograd.backward(total)
        self.optimiser.step(self.rate(progress, step))
        self._balance(loads)
        self._note(loss=loss, index=out.index_loss)
        is_text = torch.zeros_like(weight)
        for place in packed.placed:
            if place.family == "text":
                is_text[place.row, place.start : place.end] = 1
        counted = (weight > 0).float()
        self._note(text=(each * is_text * counted).sum() / ((is_text * counted).sum() + 1e-6))
        self.tokens += ids.numel()

    def _balance(self, loads: dict[str, Tensor]) -> None:
        """Move each expert's bias against its load, as noaux-tc does."""
        with torch.no_grad():
            for prefix, load in loads.items():
                mean = load.mean(-1, keepdim=True)
                self.parameters[f"{prefix}.ffn.gate_bias"].add_(torch.sign(mean - load), alpha=BALANCE_STEP)

    def _note(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = value.detach()

    def report(self) -> dict[str, object]:
        return {name: [round(x, 3) for x in value.flatten().tolist()] for name, value in self.sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--stage", choices=sorted(STAGES), required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=96)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument(
        "--sweep", action="store_true", help="go through all phases within the first steps, to compile them"
    )
    a = parser.parse_args()
    began = time.time()
    stage = STAGES[a.stage]
    corpus = Corpus(a.data)
    config, compressed = corpus_config(corpus)
    device = torch.device(a.device)
    with Workers(a.data, stage.mixture, a.rows, a.length, f"{a.seed}/{a.stage}", a.workers) as stream:
        torch.manual_seed(a.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.cache_size_limit = 64
        log: dict[str, object] = {"runs": []}
        if a.resume and (a.resume / "config.json").exists():
            # A release holds rounded weights, good enough to go on from.
            _, parameters = read_release(a.resume)
        elif a.resume:
            parameters, log = checkpoint.load(a.resume)
        else:
            parameters = initial_parameters(config, a.seed)
        runs = log["runs"]
        assert isinstance(runs, list)
        parameters = {n: p.to(device).requires_grad_(not n.endswith("gate_bias")) for n, p in parameters.items()}
        on_gpu = device.type == "cuda"
        attention = FlexAttention() if on_gpu else plain_attention
        net = Net(config, compressed.to(device), SERVED, compiled=on_gpu, attention=attention)
        optimiser = Optimiser(
            parameters, config, muon_rate=stage.muon_rate, adam_rate=stage.adam_rate, decay=stage.decay
        )
        trainer = Trainer(
            net=net,
            parameters=parameters,
            optimiser=optimiser,
            stage=stage,
            device=device,
            num_anchors=a.anchors,
            generator=torch.Generator().manual_seed(a.seed),
        )
        print(f"set up in {time.time() - began:.1f} s", flush=True)
        history = []
        step, limit, clock = 0, a.minutes * 60, time.time()
        while step < a.max_steps:
            progress = (time.time() - began) / limit
            if a.sweep:
                progress = (0.0, stage.sparse_from, 0.99)[min(step // 15, 2)]
            elif progress >= 1:
                break
            trainer.step(next(stream), progress, step)
            step += 1
            if step % LOG_EVERY == 0 or step in (1, 2) or (a.sweep and step % 5 == 0):
                line = {"step": step, "s": round(time.time() - began, 1), "tokens": trainer.tokens, **trainer.report()}
                now = time.time()
                print(json.dumps(line), f"{now - clock:.2f} s since the last line", flush=True)
                clock = now
                if not math.isfinite(float(trainer.sums["loss"])):
                    raise SystemExit("the loss is not finite")
                history.append(line)
        scores = score_documents(
            net, parameters, corpus, (*CHECKED_FAMILIES, "text"), a.rows, a.length, device, step > 100
        )
        print(json.dumps(scores), flush=True)
        memory = torch.cuda.max_memory_allocated() if on_gpu else 0
        runs.append(
            {
                "stage": a.stage,
                "seed": a.seed,
                "minutes": round((time.time() - began) / 60, 2),
                "steps": step,
                "tokens": trainer.tokens,
                "rows": a.rows,
                "length": a.length,
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "torch": torch.__version__,
                "peak_bytes": memory,
                "scores": scores,
                "history": history[:: max(1, len(history) // 40)],
            }
        )
        checkpoint.save(parameters, log, a.out)
        print(
            f"done: {step} steps, {trainer.tokens} tokens, {time.time() - began:.1f} s, {memory / 2**30:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
