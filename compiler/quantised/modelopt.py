"""Loads checkpoints of NVIDIA's ModelOpt in FP8 and NVFP4, which transformers does not read itself.

    model = load_modelopt("nvidia/Llama-3.1-8B-Instruct-FP4", device_map="cuda")

transformers loads them with a quantizer that this module registers. The linears then hold the
file's own codes and scales, and decode them in plain PyTorch (`modelopt_linears.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import _default_apply_gate
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from tilewright.compiler.quantised.coded_linear import share_equal_scales
from tilewright.compiler.quantised.modelopt_linears import (
    Float4,
    Float4Weights,
    Float8,
    Float8Blocks,
    Float8PerToken,
    ModelOptExperts,
)

FILE = "hf_quant_config.json"
_METHOD = "tilewright_modelopt"
_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_KV_SCALES = ("k_scale", "v_scale")


#: The class of linears for each `quant_algo`.
ALGORITHMS: dict[str, type[Float8]] = {
    "FP8": Float8,
    "FP8_PER_CHANNEL_PER_TOKEN": Float8PerToken,
    "FP8_PB_WO": Float8Blocks,
    "NVFP4": Float4,
    "NVFP4_AWQ": Float4,
    "W4A16_NVFP4": Float4Weights,
}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: its name, dtype and shape, and the file in which it is."""

    name: str
    file: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]

    def expect(self, dtype: torch.dtype | None, shape: Sequence[int]) -> None:
        """Raises ValueError if the tensor has another shape or dtype. Dimensions of size one do not
        count. If `dtype` is None, any dtype is allowed."""
        squeezed = tuple(n for n in self.shape if n != 1)
        if dtype not in (None, self.dtype) or squeezed != tuple(n for n in shape if n != 1):
            expected = f"{dtype or 'a float'} {list(shape)}"
            self.refuse(f"expected {expected}, got {self.dtype} {list(self.shape)}")

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{Path(self.file).name}: {self.name}: {why}")

    def empty(self) -> nn.Parameter:
        """Returns an empty parameter into which the tensor can be loaded."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return nn.Parameter(made, requires_grad=False)


@register_quantization_config(_METHOD)
class ModelOptConfig(QuantizationConfigMixin):
    """ModelOpt's description of how a checkpoint is quantised.

    `quant_algo` is the algorithm of all linears. If it is "MIXED_PRECISION", `quantized_layers` has
    the algorithm of each linear.
    """

    def __init__(
        self, quant_algo: str, quantized_layers: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        self.quant_method = _METHOD
        self.quant_algo = quant_algo
        self.quantized_layers = dict(quantized_layers or {})

    def linear_of(self, path: str) -> type[Float8]:
        """Returns the class for the linear whose name is `path`. Raises ValueError for an algorithm
        without a class."""
        own = self.quantized_layers.get(path, {}).get("quant_algo", self.quant_algo)
        if str(own).upper() not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"{FILE}: quant_algo of {path}: expected one of {known}, got {own}")
        return ALGORITHMS[str(own).upper()]


@register_quantizer(_METHOD)
class ModelOptQuantizer(HfQuantizer):
    """Replaces a model's linears before transformers loads its weights.

    The new linears decode their codes with PyTorch operations.
    """

    quantization_config: ModelOptConfig
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] = (), **others: Any
    ) -> None:
        stored = {one.name: one for file in checkpoint_files for one in stored_in(file)}
        _take_experts_apart(model, stored)
        for name, one in stored.items():
            path, _, own = name.rpartition(".")
            if own == "weight_scale":
                model.set_submodule(path, self._coded(_linear_at(model, path, one), path, stored))
        for name, one in stored.items():
            path, _, own = name.rpartition(".")
            if own in _KV_SCALES:
                _module_at(model, path, one).register_parameter(own, one.empty())
            elif own == "weight" and one.dtype in _CODES and f"{path}.weight_scale" not in stored:
                one.refuse(f"expected {path}.weight_scale beside codes, got none")

    def _coded(self, linear: nn.Linear, path: str, stored: Mapping[str, Stored]) -> Float8:
        """Returns the linear that replaces a dense one. It is on the meta device."""
        kind = self.quantization_config.linear_of(path)
        for name in kind.needed:
            if f"{path}.{name}" not in stored:
                stored[f"{path}.weight_scale"].refuse(f"expected {path}.{name} beside it, got none")
        names = (*kind.needed, "pre_quant_scale")
        own = {name: one for name in names if (one := stored.get(f"{path}.{name}"))}
        rows, columns = linear.out_features, linear.in_features
        shapes = {"pre_quant_scale": (columns,), **kind.shapes(rows, columns)}
        for name, one in own.items():
            one.expect(kind.stored if name == "weight" else None, shapes.get(name, ()))
        tensors = {name: one.empty() for name, one in own.items()}
        return kind(columns, rows, {"bias": linear.bias, **tensors})

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        linears = {n: m for n, m in model.named_modules() if isinstance(m, Float8)}
        for linear in linears.values():
            linear.settle()
        share_equal_scales(linears)
        for path, experts in list(model.named_modules()):
            if isinstance(experts, ExpertsApart):
                model.set_submodule(path, experts.together())

    def update_weight_conversions(self, weight_conversions: Any, model: nn.Module) -> Any:
        """Leaves out the conversions that join experts into one tensor, for experts that the model
        holds separately."""
        apart = any(isinstance(module, ExpertsApart) for module in model.modules())
        merging = ("experts.gate_up_proj", "experts.down_proj")
        kept = [
            conversion
            for conversion in weight_conversions
            if not (apart and any(t.endswith(merging) for t in conversion.target_patterns))
        ]
        return super().update_weight_conversions(kept, model)


class ExpertsApart(nn.Module):
    """Experts in the form that the files have: each expert has separate linears. A model has them
    only while its weights are loaded."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.activation = experts.act_fn
        number, rows, columns = experts.gate_up_proj.shape
        shapes = dict.fromkeys(("gate_proj", "up_proj"), (columns, rows // 2))
        shapes |= {"down_proj": (rows // 2, columns)}
        with torch.device("meta"):
            for expert in range(number):
                linears = {name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
                self.add_module(str(expert), nn.ModuleDict(linears))

    def together(self) -> ModelOptExperts:
        """Returns experts that hold one tensor for each projection, with the weights of all
        experts."""
        experts: Any = [module for module in self.children() if module is not self.activation]
        return ModelOptExperts(experts, self.activation)


def _take_experts_apart(model: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Replaces experts in one tensor by experts with separate linears, if the file has codes of
    experts.

    Raises ValueError if the file has codes of some experts, but not of these.
    """
    coded = {path for name in stored if (path := _experts_of(name))}
    for path, module in list(model.named_modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            if path in coded and is_plain(module):
                model.set_submodule(path, ExpertsApart(module))
            elif coded:
                known = f"gate_proj, up_proj and down_proj as for {min(coded)}"
                raise ValueError(f"{path}: expected codes of its experts' {known}, got none")


def _experts_of(name: str) -> str:
    """Returns the path of the experts if a tensor is the scale of an expert's weight. Returns ""
    for other tensors."""
    path, _, own = name.rpartition(".")
    parts = path.rsplit(".", 2)
    return parts[0] if own == "weight_scale" and len(parts) == 3 and parts[1].isdigit() else ""


def is_plain(experts: Any) -> bool:
    """Whether experts compute silu(gate) * up or a similar product, with gate's rows first and
    without biases."""
    known = getattr(type(experts), "_apply_gate", None) is _default_apply_gate
    return known and not (experts.has_bias or experts.is_transposed) and experts.is_concatenated


def _module_at(model: nn.Module, path: str, one: Stored) -> nn.Module:
    """Returns the module to which a tensor of a checkpoint belongs. Raises ValueError if there is
    none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        one.refuse(f"expected a module of the model at {path}, got none")


def _linear_at(model: nn.Module, path: str, one: Stored) -> nn.Linear:
    """Returns the linear to which a tensor belongs. Raises ValueError if the module is no
    linear."""
    found = _module_at(model, path, one)
    if not isinstance(found, nn.Linear):
        one.refuse(f"expected an nn.Linear of the model at {path}, got {type(found).__name__}")
    return found


def stored_in(file: str) -> list[Stored]:
    """Returns the tensors in a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return [
            Stored(name, file, _DTYPES.get(one.get_dtype()), tuple(one.get_shape()))
            for name, one in slices.items()
        ]


def load_modelopt(name: str | Path, **options: Any) -> nn.Module:
    """Loads a causal language model from a checkpoint of ModelOpt.

    `name` is a folder, or a name on the hub. `options` are the options of transformers'
    `from_pretrained`, such as `device_map`. The function reads hf_quant_config.json, or
    `quantization_config` in config.json. Scales of keys and values become parameters of the modules
    that the file names; `tools.paged_cache.kv_scales` collects them.

    Raises FileNotFoundError for a path that is not a folder. Raises ValueError, which names the
    file and the tensor, for a tensor that does not fit its format, and for algorithms other than
    FP8 (per tensor, per channel and token, or by blocks) and NVFP4.
    """
    if _is_path(name) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"name: expected a checkpoint's folder, got {str(name)!r}")
    config: Any = AutoConfig.from_pretrained(name)
    found = cached_file(name, FILE, _raise_exceptions_for_missing_entries=False)
    stated = getattr(config, "quantization_config", None)
    if found is not None:
        stated = json.loads(Path(found).read_text("utf-8"))["quantization"]
    if not stated or "quant_algo" not in stated:
        raise ValueError(f"{name}: expected {FILE} with a quant_algo, got none")
    config.quantization_config = {**stated, "quant_method": _METHOD}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(name, config=config, **options)
    return model.eval().requires_grad_(False)


def _is_path(name: str | Path) -> bool:
    """Whether a name is a path and not an `owner/model` of the hub."""
    text = str(name)
    return isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
