"""Writes small quantised checkpoints with random weights, in two formats of the Hugging Face Hub.
docs/tutorials/quantised-models.md loads them.

write("awq", model)  # a Llama with dense weights; writes to the folder "awq"
write("fp8", model)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

GROUP = 64


def awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns random words of eight codes [K, N / 8], zeros [K / 64, N / 8] and scales [K / 64,
    N]."""
    rows, columns = weight.shape
    groups = columns // GROUP
    words = [torch.randint(-(2**31), 2**31, (n, rows // 8)).int() for n in (columns, groups)]
    scales = (torch.rand(groups, rows) * 0.01 + 0.002).half()
    return {"qweight": words[0], "qzeros": words[1], "scales": scales}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns codes [N, K] with a scale for each row, as in FP8_DYNAMIC of compressed-tensors."""
    scale = weight.abs().amax(1, keepdim=True).float() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.to(weight.dtype)}


_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_LINEARS = {
    "targets": ["Linear"],
    "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
    "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
}
FORMATS: dict[str, Any] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
                  "version": "gemm", "modules_to_not_convert": ["lm_head"]}),
    "fp8": (fp8, {"quant_method": "compressed-tensors", "format": "float-quantized",
                  "quantization_status": "compressed", "ignore": ["lm_head"],
                  "config_groups": {"group_0": _FP8_LINEARS}}),
}  # fmt: skip


def write(name: str, model: nn.Module) -> None:
    """Writes the checkpoint of a model in one of FORMATS to a folder of that name."""
    stored, config = FORMATS[name]
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for own, module in model.named_modules():
        if isinstance(module, nn.Linear) and own != "lm_head":
            weight = state.pop(f"{own}.weight")
            state |= {f"{own}.{key}": tensor for key, tensor in stored(weight).items()}
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {"architectures": [type(model).__name__], "quantization_config": config}
    known: Any = model.config
    (folder / "config.json").write_text(json.dumps(known.to_dict() | facts, default=str))
