"""Score a checkpoint on held-out items and text, by generation.

    python -m shoal_nano.evaluate --data DIR (--release DIR | --training DIR) --out scores.json

The scorer itself needs no torch: `shoal_nano.tasks.held_out_items` gives the questions and `check` judges any engine's answers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

from shoal_nano import checkpoint
from shoal_nano.config import NanoConfig
from shoal_nano.generate import EOS_ID, Generated, Sampling, generate
from shoal_nano.net import Net, Served
from shoal_nano.ops import SERVED
from shoal_nano.prompt import render
from shoal_nano.released import read_release
from shoal_nano.stream import Corpus
from shoal_nano.tasks import CHECKED_FAMILIES, check, held_out_items
from shoal_nano.tokenizer import END_THINK, compressed_ids
from shoal_nano.train import corpus_config
from shoal_nano.weights import Parameters

TEXT_PROMPT, TEXT_TOKENS = 128, 64
ANSWER_SLACK = 8
SEED = 1


def answer_of(corpus: Corpus, output: list[int], is_thinking: bool) -> str:
    """The content of an output: after the reasoning, without EOS."""
    ids = output[:-1] if output and output[-1] == EOS_ID else output
    text: str = corpus.tokenizer.decode(ids, skip_special_tokens=False)
    return text.split(END_THINK, 1)[-1] if is_thinking else text


def accept_summary(results: list[Generated]) -> dict[str, float]:
    """Mean accepted drafts over all rounds, and over the rounds that had a whole block of output left."""
    every = [count for result in results for count, _ in result.accepts]
    whole = [count for result in results for count, left in result.accepts if left >= 5]
    return {
        "rounds": len(every),
        "mean": round(sum(every) / max(1, len(every)), 3),
        "whole_block_rounds": len(whole),
        "whole_block_mean": round(sum(whole) / max(1, len(whole)), 3),
    }


def score_family(net: Net, w: Served, corpus: Corpus, family: str, count: int, sampling: Sampling, device: torch.device
                 ) -> tuple[dict[str, object], list[Generated]]:  # fmt: skip
    """Generate answers to held-out items of a family and check them. The reference answer serves as a guess to verify."""
    results: list[Generated] = []
    right, wrong = 0, []
    for row, item in enumerate(held_out_items(family, count, SEED)):
        document = corpus.encoder.encode(render(item.dialogue, corpus.tools), family, 1.0)
        prompt, reference = document.ids[: document.prompt_length], document.ids[document.prompt_length :]
        result = generate(net, w, prompt, len(reference) + ANSWER_SLACK, sampling, device, row=row, guess=reference)
        answer = answer_of(corpus, result.output, item.dialogue.is_thinking)
        is_right = check(item, answer)
        right += is_right
        if not is_right:
            wrong.append({"question": item.wanted.user[-120:], "wanted": item.wanted.answer, "answer": answer})
        results.append(result)
    return {"items": count, "right": right, "share": round(right / count, 4), "accept": accept_summary(results), "wrong": wrong[:4]}, results


def score_text(net: Net, w: Served, corpus: Corpus, count: int, sampling: Sampling, device: torch.device) -> dict[str, object]:
    """Draft acceptance while continuing held-out text."""
    rng = random.Random(SEED)
    prompts = [corpus.text(rng, TEXT_PROMPT, held_out=True).ids for _ in range(count)]
    done = [generate(net, w, prompt, TEXT_TOKENS, sampling, device, row=row) for row, prompt in enumerate(prompts)]
    return {"prompts": count, "accept": accept_summary(done)}


def load_model(corpus: Corpus, release: Path | None, training: Path | None) -> tuple[NanoConfig, Parameters, torch.Tensor]:
    """Config, parameters and compressed ids from a release or a training checkpoint."""
    if release is not None:
        config, parameters = read_release(release)
        return config, parameters, torch.tensor(compressed_ids(corpus.tokenizer))
    if training is None:
        raise ValueError("give a release or a training checkpoint")
    config, compressed = corpus_config(corpus)
    return config, checkpoint.load(training)[0], compressed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--release", type=Path)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--families", default=",".join(CHECKED_FAMILIES))
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    began = time.time()
    device = torch.device(a.device)
    corpus = Corpus(a.data)
    config, parameters, compressed = load_model(corpus, a.release, a.training)
    net = Net(config, compressed.to(device), SERVED)
    report: dict[str, object] = {}
    with torch.no_grad():
        w = net.serve({name: p.to(device) for name, p in parameters.items()})
        for temperature in map(float, a.temperatures.split(",")):
            sampling = Sampling(temperature=temperature, seed=SEED)
            key = f"temperature {temperature:g}"
            scores: dict[str, object] = {}
            report[key] = scores
            pooled: list[Generated] = []
            for family in a.families.split(","):
                scores[family], results = score_family(net, w, corpus, family, a.items, sampling, device)
                pooled += results
                scores["tasks accept"] = accept_summary(pooled)
                a.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
                print(key, family, json.dumps(scores[family], ensure_ascii=False), f"{time.time() - began:.0f} s", flush=True)
            scores["text"] = score_text(net, w, corpus, a.texts, sampling, device)
            a.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(report, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
