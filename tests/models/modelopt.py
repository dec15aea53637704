"""Checkpoints in the form in which NVIDIA's ModelOpt exports them. They are written from a dense
model without ModelOpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST_ACTIVATION = 4.0
#: The cache scales of layer 0. The scales of each further layer are larger by a half.
K_SCALE, V_SCALE = 0.02, 0.035


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax() / 448
    given = torch.tensor(LARGEST_ACTIVATION / 448)
    return {"weight": (weight / scale).to(E4M3), "weight_scale": scale, "input_scale": given}


def fp8_channel(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1) / 448
    return {"weight": (weight / scale[:, None]).to(E4M3), "weight_scale": scale}


def fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantises with scales [N / 128, 1, K / 128, 1]."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(E4M3).view(padded.shape)[:rows, :columns].contiguous()
    return {"weight": codes, "weight_scale": scale}


def nvfp4(weight: torch.Tensor, largest: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    return nvfp4_weights(weight, largest) | {
        "input_scale": torch.tensor(LARGEST_ACTIVATION / (6 * 448))
    }


def nvfp4_weights(
    weight: torch.Tensor, largest: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Quantises to NVFP4. `largest` is the largest number of the weights that share weight_scale_2;
    None for this weight alone."""
    factor = (weight.abs().amax() if largest is None else largest) / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / (6 * factor)).clamp(2**-9, 448).to(E4M3)
    size = groups / (scale.float() * factor)[..., None]
    codes = (size.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (size < 0)
    codes = codes.flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}


ALGORITHMS = {
    "FP8": fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": fp8_channel,
    "fp8_pb_wo": fp8_blocks,
    "NVFP4": nvfp4,
    "NVFP4_AWQ": nvfp4,
    "W4A16_NVFP4": nvfp4_weights,
}


def decoded(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Decodes a weight's tensors in a file to float64."""
    codes, scale = stored["weight"], stored["weight_scale"].double()
    if codes.dtype == torch.uint8:
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        numbers = E2M1.double()[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
        return (numbers.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1) * stored[
            "weight_scale_2"
        ].double()
    if scale.dim() == 4:
        spread = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * spread[: codes.shape[0], : codes.shape[1]]
    return codes.double() * scale.reshape(-1, 1)


def write(
    model: Any,
    folder: Path,
    algorithm: str,
    *,
    kv_scales: bool = False,
    stated: bool = True,
    shards: int = 1,
    skipped: tuple[str, ...] = ("lm_head", "mlp.gate"),
    changes: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint and returns its tensors.

    algorithm: a name in ALGORITHMS, or "mixed" (attention in FP8, the rest in NVFP4).
    stated: whether config.json has the algorithm, too.
    shards: the number of files.
    changes: tensors with other contents; None leaves a tensor out.
    """
    state = experts_apart({name: t.clone() for name, t in model.state_dict().items()})
    dense, layers = dict(state), cast(dict[str, Any], {})
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    for name in [key.removesuffix(".weight") for key in state]:
        if (name in linears or ".experts." in name) and not name.endswith(skipped):
            mixed = "FP8" if "attn" in name else "NVFP4"
            layers[name] = {"quant_algo": mixed if algorithm == "mixed" else algorithm}
            algo, given = ALGORITHMS[layers[name]["quant_algo"]], {}
            if algo in (nvfp4, nvfp4_weights) and name.endswith(("gate_proj", "up_proj")):
                given = {"largest": _largest_of_both(dense, name)}
            made = algo(state.pop(f"{name}.weight").float(), **given)
            if ".experts." in name and "input_scale" in made:
                made["input_scale"] = made["input_scale"] * (1 + int(name.split(".")[-2]) / 4)
            state |= {f"{name}.{own}": tensor for own, tensor in made.items()}
    for name, module in model.named_modules():
        if kv_scales and hasattr(module, "k_proj"):
            growth = 1 + module.layer_idx / 2
            state[f"{name}.k_proj.k_scale"] = torch.tensor(K_SCALE * growth)
            state[f"{name}.v_proj.v_scale"] = torch.tensor(V_SCALE * growth)
    state |= changes or {}
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    _save(state, folder, shards)
    how: dict[str, Any] = {"quant_algo": algorithm, "exclude_modules": list(skipped)}
    how |= {"kv_cache_quant_algo": "FP8" if kv_scales else None}
    if algorithm == "mixed":
        how |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": how}
    (folder / "hf_quant_config.json").write_text(json.dumps(found))
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if stated:
        config |= {"quantization_config": how | {"quant_method": "modelopt"}}
    (folder / "config.json").write_text(json.dumps(config))
    return state


def _largest_of_both(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the largest weight of gate and up, because ModelOpt gives both one factor."""
    path = name.rpartition(".")[0]
    pair = (state[f"{path}.{own}.weight"].float().abs().amax() for own in ("gate_proj", "up_proj"))
    return torch.stack(list(pair)).amax()


def experts_apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a state dict in which each expert has its own linears, as in checkpoint files."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        path, _, own = name.rpartition(".")
        if own not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            found[name] = tensor
            continue
        for number, weight in enumerate(tensor):
            parts = {own: weight}
            if own == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            for part, rows in parts.items():
                found[f"{path}.{number}.{part}.weight"] = rows.clone()
    return found


def _save(state: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    folder.mkdir(exist_ok=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: names[i % shards] for i, name in enumerate(sorted(state))}
    for file in names:
        part = {name: tensor for name, tensor in state.items() if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
