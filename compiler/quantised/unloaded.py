"""Builds the modules of a quantised checkpoint from its configuration alone, without loading it.

    model = AutoModelForCausalLM.from_config(config)            # dense, on the meta device
    put_codes(model, config_dict["quantization_config"])        # its linears hold codes now

The modules are the ones that `prepare` would make of the loaded checkpoint, but on the meta device.
No library is needed, except compressed-tensors and torchao for their own checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tilewright.codegen.formats import TABLES
from tilewright.compiler.quantised import operators, prepare
from tilewright.compiler.quantised.bitsandbytes import OutlierLinear, TableLinear
from tilewright.compiler.quantised.coded_experts import CodedExperts
from tilewright.compiler.quantised.coded_linear import SHARED, CodedLinear
from tilewright.compiler.quantised.gpt_oss import BLOCK as MX_BLOCK
from tilewright.compiler.quantised.gpt_oss import Mxfp4Experts
from tilewright.compiler.quantised.gptqmodel import AwqLinear, GptqLinear
from tilewright.ops.formats.fp8_block import BLOCK

Stated = Mapping[str, Any]
_E4M3 = torch.float8_e4m3fn
#: The number of 4-bit codes of bitsandbytes that share a scale.
_TABLE_BLOCK = 64
#: The magnitude from which bitsandbytes treats a number as an outlier.
_THRESHOLD = 6.0
#: The number of columns in a group of GPTQ's and AWQ's codes if a configuration names none. It is
#: the default of transformers' GPTQConfig and AwqConfig.
DEFAULT_GROUP_SIZE = 128


class BlockLinear(CodedLinear):
    """A linear of FineGrainedFP8, with weight [N, K] e4m3, and weight_scale_inv, which holds scales
    by blocks or a single number. It computes what `operators.py` declares for the operators of the
    hub's `finegrained-fp8` kernel."""

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor

    def __init__(self, linear: nn.Linear, stated: Stated) -> None:
        rows, columns = linear.weight.shape
        self.block = stated.get("weight_block_size")
        scale = () if self.block is None else _by_blocks(rows, columns, self.block)
        dtype = torch.float8_e8m0fnu if stated.get("scale_fmt") == "ue8m0" else torch.float32
        given = _empty((), torch.float32) if stated.get("activation_scheme") == "static" else None
        tensors = {
            "weight": _empty((rows, columns), _E4M3),
            "weight_scale_inv": _empty(scale, dtype),
            "activation_scale": given,
            "bias": linear.bias,
        }
        super().__init__(columns, rows, tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale, given = self.weight, self.weight_scale_inv, self._buffers["activation_scale"]
        if self.block is None:
            y = operators.tensor_dynamic(x, weight, scale, x.dtype)
        elif given is None:
            y = operators.block_dynamic(x, weight, scale, self.block, x.dtype)
        else:
            y = operators.block_static(x, weight, scale, given, self.block, x.dtype)
        return y if self.bias is None else y + self.bias


class BlockExperts(CodedExperts):
    """Experts of FineGrainedFP8, with gate_up_proj [E, 2 I, H] and down_proj [E, H, I] in e4m3 and
    scales by blocks."""

    def __init__(self, experts: Any, stated: Stated) -> None:
        super().__init__()
        self.num_experts, self.activation = len(experts.gate_up_proj), experts.act_fn
        self.block = stated["weight_block_size"]
        dtype = torch.float8_e8m0fnu if stated.get("scale_fmt") == "ue8m0" else torch.float32
        for name in ("gate_up_proj", "down_proj"):
            number, rows, columns = getattr(experts, name).shape
            scale = (number, *_by_blocks(rows, columns, self.block))
            self.register_buffer(name, _empty((number, rows, columns), _E4M3))
            self.register_buffer(f"{name}_scale_inv", _empty(scale, dtype))

    def _product(self, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        codes, scale = self.get_buffer(name), self.get_buffer(f"{name}_scale_inv")
        return operators.block_grouped(x, codes, scale, ends, ends, self.block, x.dtype)

    def of_rows(self, x: torch.Tensor, ends: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        gate, up = self._product("gate_up_proj", x, ends).chunk(2, dim=-1)
        return self._product("down_proj", self.activation(gate) * up, ends)


def put_codes(model: nn.Module, stated: Stated) -> None:
    """Replaces modules of a dense model on the meta device by modules that hold codes.

    `stated` is the `quantization_config` of the checkpoint's config.json, or ModelOpt's
    `quantization`.

    Raises ValueError, which names the method, if a configuration alone does not give enough
    information.
    """
    method = str(stated.get("quant_method", "modelopt" if "quant_algo" in stated else ""))
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(
            f"quant_method {method!r}: modules of this method cannot be built from a "
            f"configuration alone; modules of {known} can. For others, give `tilewright inspect` "
            "a function that loads the checkpoint"
        )
    METHODS[method](model, stated)
    _share_scales(model)


def _share_scales(model: nn.Module) -> None:
    """Makes the linears of one parent share a scale of activations.

    In checkpoints, linears that read one activation have equal scales, and `share_equal_scales`
    finds them. Here scales have no values, so all linears of a parent share one scale.
    """
    for parent in model.modules():
        shared: dict[tuple[str, torch.Size], torch.Tensor] = {}
        linears = [one for one in parent.children() if isinstance(one, CodedLinear)]
        for linear, name in product(linears, (*SHARED, "activation_scale")):
            held: dict[str, Any] = (
                linear._parameters if name in linear._parameters else linear._buffers
            )
            tensor = held.get(name)
            if tensor is not None:
                held[name] = shared.setdefault((name, tensor.shape), tensor)


# --- methods --------------------------------------------------------------------------------------


def _finegrained(model: Any, stated: Stated) -> None:
    block = stated.get("weight_block_size")
    if block is not None and list(block) != [BLOCK, BLOCK]:
        raise ValueError(f"fp8: weight_block_size: expected {[BLOCK, BLOCK]}, got {list(block)}")
    skips = _skips(model, stated.get("modules_to_not_convert"))
    _put(model, skips, lambda _, linear: BlockLinear(linear, stated))
    for name, experts in _stacked_experts(model):
        if not skips(name):
            if block is None or stated.get("expert_dtype", "fp8") != "fp8":
                raise ValueError("fp8: experts: expected float8 codes with scales by blocks")
            _check_plain("fp8", experts)
            model.set_submodule(name, BlockExperts(experts, stated))


def _gptq(model: Any, stated: Stated) -> None:
    _check_four_bits("gptq", stated)
    if stated.get("desc_act") and _group_size(stated) > 0:
        raise ValueError("gptq: desc_act: expected false; no pattern reads codes whose groups "
                         "have columns in another order")  # fmt: skip
    if stated.get("modules_in_block_to_quantize"):
        raise ValueError("gptq: modules_in_block_to_quantize: expected none; every linear of a "
                         "layer must have codes")  # fmt: skip
    head = not stated.get("lm_head", False)
    skips = _skips(model, stated.get("modules_to_not_convert") or [], head)
    _put(model, skips, lambda _, one: GptqLinear(_grouped("gptq", stated, one, packs_columns=True)))


def _awq(model: Any, stated: Stated) -> None:
    _check_four_bits("awq", stated)
    form = str(stated.get("version", stated.get("format", "gemm"))).lower()
    if form != "gemm":
        raise ValueError(f"awq: version: expected 'gemm', got {form!r}")

    skips = _skips(model, stated.get("modules_to_not_convert"), head=True)
    _put(model, skips, lambda _, one: AwqLinear(_grouped("awq", stated, one, packs_columns=False)))


def _bitsandbytes(model: Any, stated: Stated) -> None:
    four = stated.get("load_in_4bit") or stated.get("_load_in_4bit")
    threshold = float(stated.get("llm_int8_threshold", _THRESHOLD))
    kind = str(stated.get("bnb_4bit_quant_type", "fp4"))
    if four and kind not in TABLES:
        raise ValueError(f"bitsandbytes: bnb_4bit_quant_type: expected one of {list(TABLES)}, "
                         f"got {kind!r}")  # fmt: skip
    if not four and threshold <= 0:
        raise ValueError("bitsandbytes: llm_int8_threshold: expected more than 0; without columns "
                         "of outliers, the library's own operators compute the "
                         "product")  # fmt: skip
    compute = str(stated.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")

    def made(linear: nn.Linear) -> nn.Module:
        rows, columns = linear.weight.shape
        if not four:
            tensors = {"codes": _empty((rows, columns), torch.int8), "bias": linear.bias}
            tensors["scale"] = _empty((rows,), torch.float32)
            return OutlierLinear(columns, rows, tensors, threshold)
        if rows * columns % _TABLE_BLOCK:
            raise ValueError(f"bitsandbytes: weight: expected a multiple of {_TABLE_BLOCK} "
                             f"elements, got {[rows, columns]}")  # fmt: skip
        codes = _empty((rows * columns // 2,), torch.uint8)
        absmax = _empty((rows * columns // _TABLE_BLOCK,), torch.float32)
        weight = SimpleNamespace(quant_state=SimpleNamespace(quant_type=kind))
        module = SimpleNamespace(in_features=columns, out_features=rows, weight=weight,
                                 compute_dtype=getattr(torch, compute))  # fmt: skip
        return TableLinear(module, {"codes": codes, "absmax": absmax, "bias": linear.bias})

    _put(model, _skips(model, stated.get("llm_int8_skip_modules")), lambda _, one: made(one))


def _mxfp4(model: Any, stated: Stated) -> None:
    skips = _skips(model, stated.get("modules_to_not_convert"))
    found = [(name, module) for name, module in model.named_modules()
             if type(module).__name__ == "GptOssExperts" and not skips(name)]  # fmt: skip
    if not found:
        raise ValueError(
            "mxfp4: expected a model with the experts of gpt-oss, got a model without such experts"
        )
    for name, experts in found:
        weights = {}
        for own in ("gate_up_proj", "down_proj"):
            number, columns, rows = getattr(experts, own).shape
            groups = (number, rows, columns // MX_BLOCK)
            blocks = _empty((*groups, MX_BLOCK // 2), torch.uint8)
            weights[own] = blocks, _empty(groups, torch.uint8)
        model.set_submodule(name, Mxfp4Experts(experts, weights))


def _modelopt(model: Any, stated: Stated) -> None:
    from tilewright.compiler.quantised.modelopt import ModelOptConfig

    config = ModelOptConfig(**stated)
    excluded = [str(name) for name in stated.get("exclude_modules") or stated.get("ignore") or ()]
    skips = _skips(model, [], head=True)

    def is_dense(name: str) -> bool:
        if config.quantized_layers:
            return name not in config.quantized_layers
        return skips(name) or any(fnmatch(name, e) or name.endswith(e) for e in excluded)

    if any(not is_dense(name) for name, _ in _stacked_experts(model)):
        raise ValueError("modelopt: experts: only the files say which codes the experts have; "
                         "tilewright.compiler.load_modelopt(name) loads them")  # fmt: skip

    def made(name: str, linear: nn.Linear) -> nn.Module:
        kind = config.linear_of(name)
        rows, columns = linear.weight.shape
        shapes = kind.shapes(rows, columns)
        tensors: dict[str, torch.Tensor | None] = {"bias": linear.bias}
        for own in kind.needed:
            dtype = torch.float32
            if own == "weight":
                dtype = kind.stored
            elif own == "weight_scale" and "weight_scale_2" in shapes:
                dtype = _E4M3
            made = _empty(shapes.get(own, ()), dtype)
            tensors[own] = nn.Parameter(made, requires_grad=False)
        return kind(columns, rows, tensors)

    _put(model, is_dense, made)


def _compressed_tensors(model: Any, stated: Stated) -> None:
    """Lets the library lay out its modules, and replaces these modules by modules that decode."""
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantiser = AutoHfQuantizer.from_config(dict(stated), pre_quantized=True)
        quantiser.validate_environment()
        with torch.device("meta"):
            quantiser.preprocess_model(model)
    except ImportError as error:
        raise ValueError(
            f"compressed-tensors: the library itself must build its modules: {error}"
        ) from (error)
    if left := prepare(model).left:
        raise ValueError(f"compressed-tensors: {left[0].name}: {left[0].reason}")


def _torchao(model: Any, stated: Stated) -> None:
    """Lets the library quantise the linears. Their weights have no values."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    skips = _skips(model, stated.get("modules_to_not_convert"))
    try:
        from torchao.quantization import quantize_

        kind = AutoQuantizationConfig.from_dict(dict(stated)).quant_type
        quantize_(model, kind, lambda one, name: type(one) is nn.Linear and not skips(name))
    except ImportError as error:
        raise ValueError(f"torchao: the library itself must build its weights: {error}") from error
    if left := prepare(model).left:
        raise ValueError(f"torchao: {left[0].name}: {left[0].reason}")


#: The function for each method, by `quant_method`.
METHODS: Mapping[str, Callable[[Any, Stated], None]] = {
    "fp8": _finegrained,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "torchao": _torchao,
}


# --- parts ----------------------------------------------------------------------------------------


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _by_blocks(rows: int, columns: int, block: Any) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def _skips(model: Any, named: Any, head: bool = False) -> Callable[[str], bool]:
    """Returns a function that takes the name of a module and tells whether a method leaves the
    module dense.

    `named` holds the modules that the configuration names; if it is None, the head stays dense, as
    transformers chooses. `head` says whether the head stays dense even if it is not named.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = getattr(model, "_keep_in_fp32_modules", None)
    patterns = HfQuantizer.get_modules_to_not_convert(model, named, kept, add_default_skips=head)
    return lambda name: not should_convert_module(name, patterns)


def _put(
    model: nn.Module, skips: Callable[[str], bool], made: Callable[[str, nn.Linear], nn.Module]
) -> None:
    """Replaces the linears of a model, except the linears that the method skips."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not skips(name):
            model.set_submodule(name, made(name, module).train(module.training))


def _stacked_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            yield name, module


def _check_plain(method: str, experts: Any) -> None:
    from tilewright.compiler.quantised.modelopt import is_plain

    if not is_plain(experts):
        raise ValueError(
            f"{method}: experts of the class {type(experts).__name__} cannot be "
            "built from a configuration"
        )


def _check_four_bits(method: str, stated: Stated) -> None:
    bits = stated.get("bits", stated.get("w_bit"))
    if bits != 4:
        raise ValueError(f"{method}: bits: expected 4, got {bits}")
    if stated.get("dynamic"):
        raise ValueError(f"{method}: dynamic: expected no rules for single modules")


def _group_size(stated: Stated) -> int:
    """Returns the number of columns in a group. Zero or less means that a row is one group. If the
    configuration names no size, returns transformers' default."""
    named = [stated[key] for key in ("group_size", "q_group_size") if key in stated]
    return int(named[0]) if named else DEFAULT_GROUP_SIZE


def _grouped(
    method: str, stated: Stated, linear: nn.Linear, packs_columns: bool
) -> SimpleNamespace:
    """Returns a stand-in for gptqmodel's linear, to replace a dense one. Its words hold eight codes
    along K or along N. Raises ValueError if the last group or the last word is incomplete."""
    rows, columns = linear.weight.shape
    group = _group_size(stated)
    group = columns if group <= 0 else group
    if columns % group:
        raise ValueError(f"{method}: group_size: expected one that divides {columns}, got {group}")
    if rows % 8 or columns % 8:
        raise ValueError(f"{method}: weight: expected rows and columns that are multiples of 8, "
                         f"the codes of a word, got {[rows, columns]}")  # fmt: skip
    words = (columns // 8, rows) if packs_columns else (columns, rows // 8)
    return SimpleNamespace(
        in_features=columns,
        out_features=rows,
        group_size=group,
        qweight=_empty(words, torch.int32),
        qzeros=_empty((columns // group, rows // 8), torch.int32),
        scales=_empty((columns // group, rows), linear.weight.dtype),
        bias=linear.bias,
    )
