"""Turn a training checkpoint into the shipped release.

    python -m shoal_nano.export --data DIR --training DIR --out kernels/shoal_nano/release
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from shoal_nano import checkpoint
from shoal_nano.net import Net
from shoal_nano.ops import SERVED
from shoal_nano.released import read_release, write_release
from shoal_nano.stream import Corpus
from shoal_nano.train import corpus_config

GENERATION_CONFIG = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": True, "temperature": 1.0}


class LossyRelease(Exception):
    """Reading the release back does not give the weights that training served."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    out: Path = a.out
    config, compressed = corpus_config(Corpus(a.data))
    parameters, log = checkpoint.load(a.training)
    total = write_release(parameters, config, out)
    shutil.copy(a.data / "tokenizer.json", out / "tokenizer.json")
    (out / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=1) + "\n")
    (out / "training.json").write_text(json.dumps(log, separators=(",", ":")) + "\n")
    back_config, back = read_release(out)
    net = Net(config, compressed, SERVED)
    served, again = net.serve(parameters), net.serve(back)
    differing = [n for n in served if not all(torch.equal(x, y) for x, y in zip(served[n], again[n], strict=True))]
    if back_config != config or differing:
        raise LossyRelease(f"config equal: {back_config == config}; differing weights: {differing}")
    files = sum(path.stat().st_size for path in out.iterdir())
    print(f"{total} bytes of tensors, {files} bytes of files, weights served from the release equal the trained ones")


if __name__ == "__main__":
    main()
