"""Parameter stacks to the released checkpoint layout and back.

source  v41-flash.md sections 3 and 4
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal_nano import quantise
from shoal_nano.config import NanoConfig, config_from_json, config_json
from shoal_nano.engram import engram_layout
from shoal_nano.weights import Parameters, specs

_BLOCK_NAMES = (
    "attn.wq_a", "attn.q_norm", "attn.wq_b", "attn.wkv", "attn.kv_norm", "attn.wo_a", "attn.wo_b", "attn_norm", "ffn_norm",
)  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One released tensor group: `name` (+ `.weight`/`.scale` for casts) holds `stack[index]` in `storage`."""

    name: str
    stack: str
    index: tuple[int, ...]
    storage: str


def _block_places(released: str, stack: str, layer: int, experts: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name in _BLOCK_NAMES:
        yield f"{released}.{name}", f"{stack}.{name}", (layer,)
    yield f"{released}.attn.attn_sink", f"{stack}.attn.attn_sink", (layer,)
    for part in ("attn", "ffn"):
        for piece in ("fn", "base", "scale"):
            yield f"{released}.hc_{part}_{piece}", f"{stack}.hc_{part}_{piece}", (layer,)
    yield f"{released}.ffn.gate", f"{stack}.ffn.gate", (layer,)
    # Text never meets the image bias, so both biases hold the same values.
    for bias in ("bias", "bias_vl"):
        yield f"{released}.ffn.gate.{bias}", f"{stack}.ffn.gate_bias", (layer,)
    for w in ("w1", "w2", "w3"):
        yield f"{released}.ffn.shared_experts.{w}", f"{stack}.ffn.shared.{w}", (layer,)
        for e in range(experts):
            yield f"{released}.ffn.experts.{e}.{w}", f"{stack}.ffn.{w}", (layer, e)


def places(c: NanoConfig) -> Iterator[Place]:
    """Every released tensor of a text-only checkpoint, by the rules of the full release."""
    named: list[tuple[str, str, tuple[int, ...]]] = [("embed", "embed", ()), ("head", "head", ()), ("norm", "norm", ())]
    for layer in range(c.num_hidden_layers):
        named += _block_places(f"layers.{layer}", "layers", layer, c.n_routed_experts)
    pooled = [s for s in c.kv_source_layer_ids if c.compress_ratios[s] == 2]
    for i, layer in enumerate(c.kv_source_layer_ids):
        for name in ("compressor.wkv", "compressor.norm", "indexer.wk", "indexer.k_norm"):
            named.append((f"layers.{layer}.attn.{name}", name, (i,)))
        if layer in pooled:
            named.append((f"layers.{layer}.attn.compressor.wgate", "compressor.wgate", (pooled.index(layer),)))
    for i, layer in enumerate(c.index_source_layer_ids):
        for name in ("indexer.wq_b", "indexer.weights_proj"):
            named.append((f"layers.{layer}.attn.{name}", name, (i,)))
    for i, layer in enumerate(c.engram_layer_ids):
        named.append((f"layers.{layer}.engram.embed", f"engram.embed.{i}", ()))
        named += [(f"layers.{layer}.engram.{name}", f"engram.{name}", (i,)) for name in ("wkv", "q_weight", "k_weight")]
    for block in range(c.num_nextn_predict_layers):
        named += _block_places(f"mtp.{block}", "mtp", block, c.dspark_n_routed_experts)
    last = c.num_nextn_predict_layers - 1
    named += [("mtp.0.main_proj", "mtp.main_proj", ()), ("mtp.0.main_norm", "mtp.main_norm", ()), (f"mtp.{last}.norm", "mtp.norm", ()),
              (f"mtp.{last}.markov_head.embed", "mtp.markov_embed", ()), (f"mtp.{last}.markov_head.head", "mtp.markov_head", ()),
              (f"mtp.{last}.confidence_head.proj", "mtp.confidence", ())]  # fmt: skip
    known = specs(c)
    for name, stack, index in named:
        yield Place(name=name, stack=stack, index=index, storage=known[stack].storage)


_BARE = ("attn_sink", "_fn", "_base", "_scale", ".bias", ".bias_vl", "engram.q_weight", "engram.k_weight")


def _tensor_name(place: Place) -> str:
    return place.name if place.name.endswith(_BARE) else place.name + ".weight"


def _scale_bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e8m0fnu)


def encode(value: Tensor, storage: str) -> tuple[Tensor, Tensor | None]:
    """A master tensor's stored bytes and, for casts, its scales."""
    value = value.detach().float().contiguous()
    if storage == "f32":
        return value, None
    if storage == "bf16":
        return value.to(torch.bfloat16), None
    if storage == "fp8":
        scale = quantise.block_scale(value)
        wide = scale.repeat_interleave(32, -1).repeat_interleave(32, -2)
        return quantise.round_e4m3(value / wide).to(torch.float8_e4m3fn), _scale_bytes(scale)
    groups = value.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    if storage == "fp8_rows":
        scale = quantise.power_of_two_ceil(amax.clamp(min=quantise.Q8_FLOOR) / quantise.FP8_MAX)
        return quantise.round_e4m3(groups / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), _scale_bytes(scale)
    scale = quantise.power_of_two_ceil(amax.clamp(min=quantise.Q4UE_FLOOR) / quantise.FP4_MAX)
    codes = quantise.round_e2m1(groups / scale[..., None]).flatten(-2)
    magnitude = torch.searchsorted(E2M1[:8].contiguous(), codes.abs())
    code = magnitude + 8 * torch.signbit(codes)
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8).view(torch.int8), _scale_bytes(scale)


def decode(data: Tensor, scale: Tensor | None, storage: str) -> Tensor:
    """float32 value of stored bytes."""
    if scale is None:
        return data.float()
    factor = torch.exp2(scale.view(torch.uint8).double() - 127).float()
    if storage == "fp8":
        return data.float() * factor.repeat_interleave(32, -1).repeat_interleave(32, -2)[..., : data.shape[-2], : data.shape[-1]]
    if storage == "fp8_rows":
        return data.float() * factor.repeat_interleave(32, -1)
    codes = data.view(torch.uint8).long()
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)]
    return values * factor.repeat_interleave(32, -1)


def released_tensors(parameters: Parameters, c: NanoConfig) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its released name."""
    result = {}
    for place in places(c):
        data, scale = encode(parameters[place.stack][place.index], place.storage)
        result[_tensor_name(place)] = data
        if scale is not None:
            result[place.name + ".scale"] = scale
    return result


def write_release(parameters: Parameters, c: NanoConfig, folder: Path) -> int:
    """Write config.json, one shard and the index. Returns the tensors' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in sorted(released_tensors(parameters, c).items())}
    shard = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")))
    (folder / "config.json").write_text(json.dumps(config_json(c, engram_layout(c).rows), indent=1) + "\n")
    return total


def read_release(folder: Path) -> tuple[NanoConfig, Parameters]:
    """Config and dequantised parameters. Raises KeyError for a missing tensor, ValueError for a misshapen one."""
    c = config_from_json(json.loads((folder / "config.json").read_text()))
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(folder / name, framework="pt") for name in set(weight_map.values())}

    def tensor(name: str) -> Tensor:
        value: Tensor = files[weight_map[name]].get_tensor(name)
        return value

    parameters = {name: torch.zeros(spec.shape) for name, spec in specs(c).items()}
    for place in places(c):
        if place.name.endswith(".bias_vl"):
            continue
        scale = tensor(place.name + ".scale") if place.storage in ("fp8", "fp4", "fp8_rows") else None
        value = decode(tensor(_tensor_name(place)), scale, place.storage)
        if value.shape != parameters[place.stack][place.index].shape:
            raise ValueError(f"{_tensor_name(place)} has shape {tuple(value.shape)}")
        parameters[place.stack][place.index] = value
    return c, parameters
