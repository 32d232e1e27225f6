"""Steps of the whole model at released size with synthetic weights: decode, prefill chunk, head, draft round.

    make bench-model-step        one rank's share of the released model (see `shoal_model.released_sizes`)

Tells, for every kind of step, the time of the step as the engine waits for it, the time the device was busy, and which
operations it went to. The host plans a step while the device is idle: the difference is what later graphs and
asynchronous scheduling can win.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from bench.harness import finish, percentile
from shoal_kernels import registry
from shoal_kernels.precision import SERVED_BF16
from shoal_model.draft import Anchor
from shoal_model.kv_layout import BLOCK_TOKENS
from shoal_model.model import Model
from shoal_model.rows import RowBatch, Segment
from shoal_model.sampler import RowChoice, RowSampling, SampleRow
from shoal_model.synthetic import Synthetic, synthetic_weights

_WARM, _TIMED, _HOST_LINES = 2, 5, 25
_WARM_LAYERS = 7  # one of every kind, a layer that reuses included
_OTHER, _SPAN = "other", "op:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """At most `requests` in decode with `rows` each behind `context` positions; prompts run in chunks of `chunk`."""

    requests: int
    rows: int
    context: int
    chunk: int


def build(synthetic: Synthetic, load: Load) -> Model:
    """A model whose cache holds random records for every position of the load's contexts."""
    config, device = synthetic.config(), torch.device("cuda")
    weights = synthetic_weights(config, precision=SERVED_BF16, device=device, seed=synthetic.seed)
    blocks = load.requests * _blocks_of(load)
    model = Model(
        config,
        weights,
        precision=SERVED_BF16,
        device=device,
        num_blocks=blocks + 1,
        num_slots=load.requests,
    )
    _fill(model, load)
    return model


def decode_step(model: Model, load: Load, requests: int) -> Callable[[], object]:
    """One verify step of so many requests, up to the final hidden rows."""

    def run() -> object:
        segments = tuple(_segment(load, slot, load.context, load.rows) for slot in range(requests))
        hidden = model.forward(RowBatch(segments=segments)).hidden
        torch.cuda.synchronize()
        return hidden

    return run


def head(model: Model, load: Load, requests: int) -> Callable[[], object]:
    """The tokens of a verify step's hidden rows."""
    rows = requests * load.rows
    choice = _choice(model, rows)
    hidden = torch.randn(rows, model.config.hidden_size, device=model.device).to(model.precision.dtype)
    return lambda: model.choose(hidden, choice).tolist()


def draft_round(model: Model, load: Load, requests: int) -> Callable[[], object]:
    """One draft of so many requests."""
    choice = _choice(model, requests)
    previous = torch.full((requests,), 9, dtype=torch.int64, device=model.device)
    anchors = [Anchor(slot=slot, position=load.context, token_id=9) for slot in range(requests)]

    def run() -> object:
        head = model.draft(anchors)
        return model.markov_loop(head, previous, choice, model.draft_size).token_ids.tolist()

    return run


def prefill_chunk(model: Model, load: Load, *, decoder: bool) -> Callable[[], object]:
    """One chunk of one prompt behind `context` positions; with `decoder` all its rows run the decoder half too."""
    start = load.context // BLOCK_TOKENS * BLOCK_TOKENS - load.chunk
    segment = _segment(load, 0, start, load.chunk)
    outputs = (load.chunk - 1,) if decoder else ()
    segment = replace(segment, decoder_start=0 if decoder else None, outputs=outputs)

    def run() -> object:
        _mark(model, 0, start)
        hidden = model.forward(RowBatch(segments=(segment,))).hidden
        torch.cuda.synchronize()
        return hidden

    return run


def measure(step: Callable[[], object]) -> dict[str, object]:
    """Median seconds of a step, of the device's work in it, and the share of each operation in that work."""
    for _ in range(_WARM):
        step()
    torch.cuda.synchronize()
    taken = []
    for _ in range(_TIMED):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    shares, busy, launches = _profile(step)
    ranked = sorted(shares, key=shares.__getitem__, reverse=True)
    return {
        "step_s": percentile(taken, 50),
        "device_s": busy,
        "launches": launches,
        "shares": {name: round(shares[name] / busy, 4) for name in ranked if shares[name] > 0.002 * busy},
    }


def _print_host_profile(step: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(step)
    pstats.Stats(profile).sort_stats("tottime").print_stats(_HOST_LINES)


def _profile(step: Callable[[], object]) -> tuple[dict[str, float], float, int]:
    """Device seconds per operation: kernels belong to the operation whose call launched them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _named_operations(), torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    spans: list[tuple[int, int, str]] = []
    launched: dict[int, int] = {}
    kernels: list[tuple[int, int]] = []
    for event in profile.profiler.kineto_results.events():
        name, is_span = event.name(), event.name().startswith(_SPAN)
        if str(event.device_type()).endswith("CUDA"):
            # Spans are drawn on the device's side too.
            kernels += [] if is_span else [(event.correlation_id(), event.duration_ns())]
        elif is_span:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix(_SPAN)))
        elif name.startswith("cu"):  # calls of the CUDA runtime and driver; they share numbers with their kernels
            launched[event.correlation_id()] = event.start_ns()
    spans.sort()
    starts = np.array([span[0] for span in spans], dtype=np.int64)
    shares: dict[str, float] = {}
    for correlation, duration in kernels:
        at = launched.get(correlation)
        index = -1 if at is None else int(np.searchsorted(starts, at, side="right")) - 1
        inside = index >= 0 and at is not None and at <= spans[index][1]
        name = spans[index][2] if inside else _OTHER
        shares[name] = shares.get(name, 0.0) + duration * 1e-9
    return shares, sum(shares.values()), len(kernels)


class _named_operations:
    """While open, every call that the registry hands out is a named span of the profiler."""

    def __enter__(self) -> None:
        self._chosen = dict(registry._chosen)
        for key, kernel in self._chosen.items():
            registry._chosen[key] = _named(key[0], kernel)

    def __exit__(self, *_: object) -> None:
        registry._chosen.clear()
        registry._chosen.update(self._chosen)


def _named(op: str, kernel: registry.Kernel) -> registry.Kernel:
    def call(*arguments: object, **named: object) -> object:
        with torch.profiler.record_function(f"{_SPAN}{op}"):
            return kernel(*arguments, **named)

    return call


def _blocks_of(load: Load) -> int:
    return -(-(load.context + load.rows) // BLOCK_TOKENS)


def _segment(load: Load, slot: int, start: int, rows: int) -> Segment:
    count = _blocks_of(load)
    tokens = (np.arange(start, start + rows) * 7919 + slot * 104729) % 100_000
    return Segment(
        slot=slot,
        block_table=np.arange(1 + slot * count, 1 + (slot + 1) * count),
        start=start,
        token_ids=tokens,
        lookback=[3, 4, 5],
        outputs=range(rows),
    )


def _choice(model: Model, rows: int) -> RowChoice:
    sampling = RowSampling(temperature=1.0)
    return RowChoice.of([SampleRow(sampling=sampling, seed=i, output_index=3) for i in range(rows)], model.device)


def _fill(model: Model, load: Load) -> None:
    pages = model.cache.pages
    for plan in model.layer_map.kv_owners:
        for rows, scale in ((pages.main(plan.layer), 0x30), (pages.index(plan.layer), 125)):
            data, scales = rows._sections()
            for part in data.split(1024):
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=part.device))
            scales.fill_(scale)
    state = model.cache.state
    head_dim = model.config.head_dim
    for ring in (state.encoder, state.decoder, state.draft):
        for buffer in ring.layers:
            buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, device=buffer.device) & 0xBF)
            buffer[:, head_dim:] = 127
    for buffer in state.pairs.layers:
        buffer.normal_()
    for slot in range(load.requests):
        _mark(model, slot, load.context)


def _mark(model: Model, slot: int, length: int) -> None:
    """The rings of a slot hold the positions below `length`."""
    for ring in model.cache.state.rings:
        positions = np.arange(max(0, length - ring.length), length)
        ring.tags.mark(ring.tags.places(np.full_like(positions, slot), positions), positions)


def _steps(model: Model, load: Load, counts: Sequence[int]) -> Iterator[tuple[str, Callable[[], object]]]:
    for requests in counts:
        yield f"decode, {requests} requests", decode_step(model, load, requests)
    yield "prefill, encoder half", prefill_chunk(model, load, decoder=False)
    yield "prefill, both halves", prefill_chunk(model, load, decoder=True)
    for requests in counts:
        yield f"head, {requests} requests", head(model, load, requests)
        yield f"draft, {requests} requests", draft_round(model, load, requests)


def _compile_side_by_side(counts: Sequence[int], rows: int, chunk: int) -> None:
    """Run every step on a few layers with short contexts, each in a process of its own: compilers use one core each."""
    kinds = [f"{kind}, {count} requests" for kind in ("decode", "head", "draft") for count in counts]
    command = [sys.executable, "-P", "-m", "bench.model_step", "--layers", str(_WARM_LAYERS), "--rows", str(rows)]
    command += ["--requests", ",".join(map(str, counts)), "--context", str(2 * chunk), "--chunk", str(chunk)]
    started = [
        subprocess.Popen([*command, "--only", kind], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for kind in (*kinds, "prefill, encoder", "prefill, both")
    ]
    for process in started:
        process.wait()


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns 2 without a device, 1 where a step fails."""
    parser = argparse.ArgumentParser(prog="bench.model_step")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--requests", type=lambda text: [int(part) for part in text.split(",")], default=[256, 60, 8])
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--only", default="", help="kinds of steps that begin so")
    parser.add_argument("--warm", action="store_true", help="first compile the kernels of all steps, side by side")
    parser.add_argument("--host", action="store_true", help="print where the host spends one step of each kind")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench-model-step needs a CUDA device", file=sys.stderr)
        return 2
    if args.warm:
        _compile_side_by_side(args.requests, args.rows, args.chunk)
    load = Load(requests=max(args.requests), rows=args.rows, context=args.context, chunk=args.chunk)
    begin = time.perf_counter()
    with torch.inference_mode():
        model = build(Synthetic(num_layers=args.layers), load)
        torch.cuda.synchronize()
        print(f"built in {time.perf_counter() - begin:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
        figures: dict[str, object] = {}
        failed: list[str] = []
        for name, step in _steps(model, load, args.requests):
            if not name.startswith(args.only):
                continue
            try:
                found = measure(step)
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            figures[name] = found
            print(
                f"{name:24} {found['step_s'] * 1e3:8.2f} ms, device {found['device_s'] * 1e3:8.2f} ms, "  # type: ignore[operator]
                f"{found['launches']} launches: {found['shares']}",
                flush=True,
            )
            if args.host:
                _print_host_profile(step)
    status = finish(
        "model-step",
        workload={"layers": args.layers, "ep_size": Synthetic().ep_size, **vars(args)},
        bars=[],
        figures={**figures, "failed": failed},
        device=f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
    )
    return 1 if failed else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
