"""Small models in the formats of quantisation libraries, made and loaded by these libraries.

model = SHIPPED["ct-w4a16"].load("llama", folder)  # on torch's default device

`BY_TRANSFORMERS` are formats that transformers loads itself. The hub's kernels, which need a GPU,
are replaced by the stand-ins of `finegrained.py` and `gpt_oss_hub.py`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)

from tests.models import gpt_oss_hub, modelopt, moe_dequant

GROUP = 64
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
#: Modules that compressed-tensors' checkpoints leave in bfloat16. The second list adds the experts,
#: which stay in bfloat16 in schemes whose codes transformers cannot join.
LEFT_DENSE = ["lm_head", "re:.*mlp.gate$"]
DENSE_EXPERTS = {"FP8_BLOCK": ["re:.*mlp.experts.*"]}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENTS = {"kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 64, "v_head_dim": 64}
#: For each model, its config and the fields that differ from SIZES.
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, **EXPERTS}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"qk_rope_head_dim": 64, "num_key_value_heads": 4, **EXPERTS, **LATENTS},
    ),
    "gpt_oss": (
        GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}


@dataclass(frozen=True)
class Shipped:
    """A quantisation format, and how a model in it is made and loaded.

    library: the library that must be installed.
    load: a function from (model, empty folder) to the loaded model.
    models: the keys of CONFIGS that exist in the format. An empty tuple stands for all models but
        gpt_oss, which exists only in MXFP4.
    """

    library: str
    load: Callable[[str, Path], nn.Module]
    models: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        names = self.library.split(".")
        wholes = (".".join(names[:end]) for end in range(1, len(names) + 1))
        return all(importlib.util.find_spec(name) is not None for name in wholes)


def dense(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config, fields = CONFIGS[kind]
    made = AutoModelForCausalLM.from_config(config(**SIZES | fields), dtype=torch.bfloat16)
    return made.eval().requires_grad_(False)


def _loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.eval().requires_grad_(False)


def _torchao(kind: str, folder: Path, config: str) -> nn.Module:
    from torchao import quantization

    model: Any = dense(kind)
    quantization.quantize_(model.model, getattr(quantization, config)())
    return model


def _torchao_nvfp4(kind: str, folder: Path) -> nn.Module:
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    model: Any = dense(kind)
    quantize_(model.model, NVFP4WeightOnlyConfig())
    return model


def _torchao_int4(kind: str, folder: Path, tiled: bool) -> nn.Module:
    """Returns a model quantised by torchao, with stand-ins for the kernels that need a GPU."""
    from tests.models import torchao_int4

    model: Any = dense(kind)
    torchao_int4.quantise(model.model, tiled)
    return model


def _by_config(kind: str, folder: Path, config: str, **options: Any) -> nn.Module:
    """Returns a model that transformers quantises while it loads the dense checkpoint."""
    import transformers

    dense(kind).save_pretrained(folder)
    return _loaded(folder, quantization_config=getattr(transformers, config)(**options))


def _hqq(kind: str, folder: Path, bits: int) -> nn.Module:
    """Returns a model that HQQ itself quantises, because transformers does not load this format."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model: Any = dense(kind)
    options = {"compute_dtype": torch.bfloat16, "device": str(torch.get_default_device())}
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, own = name.rpartition(".")
            config = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1)
            setattr(model.model.get_submodule(parent), own, HQQLinear(module, config, **options))
    return model.requires_grad_(False)


def _bitsandbytes(kind: str, folder: Path, **options: Any) -> nn.Module:
    if "load_in_4bit" in options:
        options["bnb_4bit_compute_dtype"] = torch.bfloat16
    model: Any = _by_config(kind, folder, "BitsAndBytesConfig", **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # The kernel of some CPUs rounds scales to bfloat16, which GPUs do not.
            module.support_avx512bf16_for_cpu = False
    return model


def compressed(
    kind: str, folder: Path, scheme: str, kv_scales: tuple[float, float] | None = None
) -> nn.Module:
    """Writes a checkpoint in which each expert has its own linears. transformers decodes and joins
    them while it loads the model.

    `kv_scales` are the scales of keys and values. With them, keys and values are rounded to float8.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model: Any = dense(kind)
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts"):
            model.set_submodule(name, nn.ModuleList(map(_one_expert, *module.parameters())))
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    ignore = LEFT_DENSE + DENSE_EXPERTS.get(scheme, [])
    kv = None if kv_scales is None else QuantizationArgs(num_bits=8, type="float", dynamic=False)
    config = QuantizationConfig(config_groups=groups, ignore=ignore, kv_cache_scheme=kv)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            if kv_scales is not None and hasattr(module, "k_scale"):
                module.k_scale.data.fill_(kv_scales[0])
                module.v_scale.data.fill_(kv_scales[1])
            else:
                calibrate(module)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    compressor.update_config(folder)
    return _loaded(folder)


def _one_expert(gate_up: torch.Tensor, down: torch.Tensor) -> nn.Module:
    """Returns the linears of an expert in the form of checkpoints, from stacked weights [2 I, H]
    and [H, I]."""
    made = nn.Module()
    gate, up = gate_up.chunk(2)
    for name, weight in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        setattr(made, name, linear)
    return made


def calibrate(module: Any) -> None:
    """Calibrates a linear of compressed-tensors.

    Sets the scales and zeros of the weight by its smallest and largest elements, and a static scale
    of the activations.
    """
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = module.quantization_scheme.weights
    weight = module.weight.float()
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        rows, columns = args.block_structure
        rest = (-weight.shape[1] % columns, -weight.shape[0] % rows)
        weight = nn.functional.pad(weight, (0, rest[0], 0, rest[1]))
        parts = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        parts = parts.transpose(1, 2).flatten(-2)
    elif "group" in strategy:
        parts = weight.unflatten(-1, (-1, args.group_size))
    else:
        parts = weight.flatten() if strategy == "tensor" else weight.unsqueeze(1)
    factor = getattr(module, "weight_global_scale", None)
    if factor is not None:
        factor.data.copy_(generate_gparam(weight.amin(), weight.amax()))
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.fill_(448 * 6 / 4.0)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, factor)
    module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.03)


def _packed(kind: str, folder: Path, method: str) -> nn.Module:
    """Writes a GPTQ or AWQ checkpoint with random words, and loads it with the backend in
    PyTorch."""
    import transformers

    model: Any = dense(kind)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            rows, columns = state.pop(f"{name}.weight").shape
            tensors = _words(method, rows, columns, generator)
            state |= {f"{name}.{own}": tensor for own, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    stored = {"quant_method": method, "bits": 4, "group_size": GROUP, "desc_act": False}
    stored |= {"sym": True, "zero_point": True, "lm_head": False, "version": "gemm"}
    stored |= {"checkpoint_format": "gptq"} if method == "gptq" else {}
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float16"}
    config |= {"quantization_config": stored | {"modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    place = str(torch.get_default_device())
    options: Any = (
        transformers.GPTQConfig(bits=4, backend="torch")
        if method == "gptq"
        else transformers.AwqConfig(backend="torch_awq")
    )
    return _loaded(folder, torch.float16, quantization_config=options, device_map=place)


def _finegrained(kind: str, folder: Path, scale_fmt: str = "float") -> nn.Module:
    """Returns a FineGrainedFP8 model that keeps its codes, as on a GPU, with a stand-in for the
    hub's kernel."""
    from tests.models import finegrained

    finegrained.library._FINEGRAINED_FP8 = finegrained.KERNEL
    return finegrained.quantised(dense(kind), scale_fmt=scale_fmt)


def _mxfp4_on_gpu(kind: str, folder: Path) -> nn.Module:
    """Returns a model whose mixtures keep their MXFP4 codes, as on a GPU, with stand-ins for the
    hub's kernels."""
    model = dense(kind)
    gpt_oss_hub.load(model, gpt_oss_hub.StridedLayout)
    return model


def _mxfp4(kind: str, folder: Path) -> nn.Module:
    """Returns a checkpoint of random codes, which transformers decodes on a machine without a
    GPU."""
    model: Any = dense(kind)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [n for n in state if n.endswith(gpt_oss_hub.PROJECTIONS)]:
        experts, columns, rows = state.pop(name).shape
        codes, scales, _ = moe_dequant.stored("mxfp4", 0, (experts, rows, columns))
        state |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(folder)
    return _loaded(folder)


def _words(
    method: str, rows: int, columns: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    groups = columns // GROUP
    scales = (torch.rand(groups, rows, generator=generator) * 0.01 + 0.002).half()
    if method == "awq":
        zeros = words(groups, rows // 8)
        return {"qweight": words(columns, rows // 8), "qzeros": zeros, "scales": scales}
    # Every zero is 8, and GPTQ stores 8 - 1.
    zeros = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
    order = (torch.arange(columns) // GROUP).to(torch.int32)
    codes = words(columns // 8, rows)
    return {"qweight": codes, "qzeros": zeros, "scales": scales, "g_idx": order}


def _modelopt(kind: str, folder: Path, algorithm: str) -> nn.Module:
    """Returns a ModelOpt model. The file is written without ModelOpt, and `load_modelopt` loads it,
    because transformers does not read its format."""
    from tilewright.compiler import load_modelopt

    modelopt.write(dense(kind), folder, algorithm)
    return load_modelopt(folder)


SHIPPED: dict[str, Shipped] = {
    "torchao-int8": Shipped("torchao", partial(_torchao, config="Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": Shipped(
        "torchao", partial(_torchao, config="Int8DynamicActivationInt8WeightConfig")
    ),
    "torchao-fp8": Shipped("torchao", partial(_torchao, config="Float8WeightOnlyConfig")),
    "torchao-int4": Shipped("torchao", partial(_torchao_int4, tiled=False)),
    "torchao-int4-tiled": Shipped("torchao", partial(_torchao_int4, tiled=True)),
    "torchao-nvfp4": Shipped("torchao", _torchao_nvfp4),
    "torchao-intx": Shipped("torchao", partial(_torchao, config="IntxWeightOnlyConfig")),
    "quanto-int8": Shipped(
        "optimum.quanto", partial(_by_config, config="QuantoConfig", weights="int8")
    ),
    "quanto-fp8": Shipped(
        "optimum.quanto", partial(_by_config, config="QuantoConfig", weights="float8")
    ),
    "bitsandbytes-nf4": Shipped(
        "bitsandbytes",
        partial(
            _bitsandbytes,
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        ),
    ),
    "bitsandbytes-fp4": Shipped(
        "bitsandbytes", partial(_bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="fp4")
    ),
    "bitsandbytes-int8": Shipped("bitsandbytes", partial(_bitsandbytes, load_in_8bit=True)),
    "hqq-int4": Shipped("hqq", partial(_hqq, bits=4)),
    "hqq-int8": Shipped("hqq", partial(_hqq, bits=8)),
    "modelopt-fp8": Shipped("transformers", partial(_modelopt, algorithm="FP8")),
    "modelopt-nvfp4": Shipped("transformers", partial(_modelopt, algorithm="NVFP4")),
    "gptq": Shipped("gptqmodel", partial(_packed, method="gptq")),
    "awq": Shipped("gptqmodel", partial(_packed, method="awq")),
    **{
        f"ct-{scheme.lower().replace('_', '-')}": Shipped(
            "compressed_tensors", partial(compressed, scheme=scheme)
        )
        for scheme in (
            "FP8",
            "FP8_DYNAMIC",
            "FP8_BLOCK",
            "W8A8",
            "W4A16",
            "W8A16",
            "NVFP4A16",
            "NVFP4",
            "MXFP4A16",
            "MXFP4",
        )
    },
}

BY_TRANSFORMERS: dict[str, Shipped] = {
    "finegrained-fp8": Shipped("transformers", _finegrained),
    "finegrained-fp8-ue8m0": Shipped("transformers", partial(_finegrained, scale_fmt="ue8m0")),
    "mxfp4": Shipped("transformers", _mxfp4, ("gpt_oss",)),
    "mxfp4-gpu": Shipped("transformers", _mxfp4_on_gpu, ("gpt_oss",)),
}


def step_of(model: Any, present: int = 5, length: int = 32) -> dict[str, Any]:
    """Returns a decode step of one sequence as `generate()` calls it, with `present` tokens in the
    cache."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    heads, width = config.num_key_value_heads, config.head_dim
    cache.early_initialization(1, heads, width, model.dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length.fill_(present)
    seen = torch.arange(length) <= present
    return {
        "input_ids": torch.tensor([[7]]),
        "past_key_values": cache,
        "position_ids": torch.tensor([[present]]),
        "attention_mask": seen.view(1, 1, 1, length),
        "use_cache": True,
    }
