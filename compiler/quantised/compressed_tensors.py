"""Reads linears of compressed-tensors in the form in which they are stored, that is, compressed.

The library decompresses all linears in the first forward pass, and wraps each module's forward in a
way that Dynamo cannot trace. The arithmetic is that of its
`quantization/lifecycle/forward_helpers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tilewright.compiler.model_cache import cache_in
from tilewright.compiler.quantised.coded_linear import (
    CodedLinear,
    DividedLinear,
    bytes_of_words,
    floats_of_bytes,
    nearest_e2m1,
    nibbles_of_words,
)
from tilewright.ops.formats import e8m0, fp4

_LIMITS = {
    ("float", 8): (-448.0, 448.0),
    ("int", 8): (-128.0, 127.0),
    ("float", 4): (-fp4.MAX, fp4.MAX),
}
#: This byte is NaN in e4m3. The bytes of the positive numbers are below it.
_FINITE_SCALES = 0x7F
#: The number with which the library replaces a scale of zero, by the dtype of the scale.
_LEAST_SCALE = {torch.float8_e4m3fn: 0.125, torch.uint8: 1.0}


@dataclass(frozen=True)
class Rounding:
    """The way in which activations are rounded: the fields of the library's `QuantizationArgs`."""

    kind: str
    bits: int
    strategy: str
    dynamic: bool | str
    group_size: int = 0
    scale_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        when = "dynamic" if self.dynamic else "static"
        return f"x {self.kind}{self.bits} per {self.strategy}, {when}"


class CompressedLinear(CodedLinear):
    """A linear of compressed-tensors.

    strategy: the strategy of the weight's scales: "tensor", "channel", "group", "tensor_group" or
        "block".
    block: the rows and columns that share a scale, if `strategy` is "block".
    rounding: the rounding of its activations, or None.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor

    def __init__(
        self, module: nn.Linear, rounding: Rounding | None, strategy: str, block: tuple[int, int]
    ) -> None:
        tensors: dict[str, torch.Tensor | None] = {"bias": None}
        tensors |= module.named_parameters(recurse=False)
        tensors |= module.named_buffers(recurse=False)
        super().__init__(module.in_features, module.out_features, tensors)
        self.rounding, self.strategy, self.block = rounding, strategy, block

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.strategy}, {self.rounding or 'x as it is'}"

    def codes(self) -> torch.Tensor:
        """Returns the codes [N, K] in the dtype of the scales."""
        return self.weight.to(self.scales().dtype)

    def scales(self) -> torch.Tensor:
        """Returns the scales as they are stored: [1], [N, 1], [N, K / group], or one for each
        block."""
        return self.weight_scale

    def zeros(self) -> torch.Tensor | None:
        """Returns the zero points in the shape of the scales, or None if the weight has none."""
        return getattr(self, "weight_zero_point", None)

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        codes, scales, zeros = self.codes(), self.scales(), self.zeros()
        if self.strategy == "block":
            scales = self._of_blocks(scales)
            zeros = None if zeros is None else self._of_blocks(zeros)
        if self.strategy in ("group", "tensor_group"):
            codes = codes.unflatten(-1, (scales.shape[-1], -1))
            scales = scales.unsqueeze(-1)
            zeros = None if zeros is None else zeros.unsqueeze(-1)
        if zeros is not None:
            codes = codes - zeros.to(scales.dtype)
        return (codes * scales).reshape(self.out_features, self.in_features).to(dtype)

    def _of_blocks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Repeats numbers, one for each block, so that the result has one for each element of the
        weight."""
        rows, columns = self.block
        spread = numbers.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return spread[: self.out_features, : self.in_features]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounding is None or x.numel() == 0:
            return x
        how, shape = self.rounding, x.shape
        if "group" in how.strategy:
            x = x.unflatten(-1, (-1, how.group_size))
        scale = self._dynamic_scale(x) if how.dynamic else self.input_scale
        if (factor := getattr(self, "input_global_scale", None)) is not None:
            scale = scale.to(factor.dtype) / factor
        low, high = _LIMITS[how.kind, how.bits]
        codes = _nearest((x / scale).clamp(low, high), how)
        return (codes.to(scale.dtype) * scale).reshape(shape).to(x.dtype)

    def _dynamic_scale(self, x: torch.Tensor) -> torch.Tensor:
        how = self.rounding
        assert how is not None
        low, high = _LIMITS[how.kind, how.bits]
        # For a matrix x, the library takes one scale for all tokens, although the strategy is
        # "token".
        whole = how.strategy == "tensor" or (how.strategy == "token" and x.dim() == 2)
        dims = tuple(range(x.dim())) if whole else (-1,)
        if how.strategy == "token" and not whole:
            dims = tuple(range(2, x.dim()))
        largest = torch.maximum(
            x.amax(dims, keepdim=True).clamp(min=0), -x.amin(dims, keepdim=True).clamp(max=0)
        )
        scale = largest / ((high - low) / 2)
        if (factor := getattr(self, "input_global_scale", None)) is not None:
            scale = factor * scale
        if how.scale_dtype == torch.uint8:
            scale = _power_of_two(largest, high)
        elif how.scale_dtype is not None:
            limit = torch.finfo(how.scale_dtype).max
            scale = scale.clamp(-limit, limit).to(how.scale_dtype).to(scale.dtype)
        least = _LEAST_SCALE.get(how.scale_dtype or scale.dtype)
        if least is None:
            least = torch.finfo(scale.dtype).eps
        return torch.where(scale == 0, least, scale)


def _nearest(x: torch.Tensor, how: Rounding) -> torch.Tensor:
    """Returns x rounded to the numbers of the format. x is in units of its scale, has been clamped
    to the range of the format, and keeps its dtype."""
    if (how.kind, how.bits) == ("float", 4):
        return nearest_e2m1(x)
    return x.round() if how.kind == "int" else x.to(torch.float8_e4m3fn).to(x.dtype)


def _power_of_two(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Returns the MX scales of groups, given the largest magnitude of each group.

    A magnitude is rounded down to a power of two, or up if it is at least 1.75 times that power.
    The result is divided by the power of two below `most`.
    """
    digits = -math.frexp(torch.finfo(largest.dtype).eps)[1] + 1
    bits = largest.view(torch.int32 if digits > 16 else torch.int16).to(torch.int32)
    exponent = (bits + (1 << (digits - 2))) >> digits
    bias = 1 - math.frexp(torch.finfo(largest.dtype).tiny)[1] + 1
    least = exponent - bias - (math.frexp(most)[1] - 1)
    least = torch.where(exponent == 0, -e8m0.BIAS, least.clamp(-e8m0.BIAS, e8m0.BIAS + 1))
    return (2.0 ** least.to(torch.float32)).to(largest.dtype)


class FloatLinear(CompressedLinear, DividedLinear):
    """A linear of 4-bit E2M1 codes. Each byte has the codes of two columns, with the even column in
    the low nibble. NVFP4 divides its scales by a number. The scales of MXFP4 are powers of two."""

    weight_packed: torch.Tensor

    def codes(self) -> torch.Tensor:
        return floats_of_bytes(self.weight_packed, self.scales().dtype)

    def scales(self) -> torch.Tensor:
        scale = self.weight_scale
        if scale.dtype == torch.uint8:
            return 2.0 ** (scale.to(torch.int32) - e8m0.BIAS).to(torch.bfloat16)
        scale = scale.to(torch.bfloat16)
        if self.weight_factors is not None:
            return scale * self.weight_factor
        divisor = getattr(self, "weight_global_scale", None)
        return scale if divisor is None else scale / divisor

    def reciprocal(self) -> torch.Tensor | None:
        factor = super().reciprocal()
        if factor is None or self.weight_scale.dtype != torch.float8_e4m3fn:
            return None
        return factor if _decodes_alike(self.weight_global_scale, factor) else None


def _decodes_alike(divisor: torch.Tensor, factor: torch.Tensor) -> bool:
    """Whether an NVFP4 weight has the same bfloat16 numbers if its scales are multiplied by
    `factor` as if they are divided by `divisor`.

    The function compares all codes and scales. On the meta device, which has no numbers, the answer
    is True.
    """
    if divisor.is_meta:
        return True
    scales = torch.arange(_FINITE_SCALES, dtype=torch.uint8, device=divisor.device)
    scales = scales.view(torch.float8_e4m3fn).to(torch.bfloat16)
    codes = torch.tensor(fp4.MAGNITUDES, device=divisor.device).unsqueeze(1)
    quotients, products = scales / divisor.reshape(1), scales * factor
    return torch.equal((codes * quotients).bfloat16(), (codes * products).bfloat16())


class PackedLinear(CompressedLinear):
    """A linear of 4-bit codes. Each word has eight codes along K, and a stored code is 8 more than
    its value."""

    weight_packed: torch.Tensor
    #: The number that is added to codes and zero points when they are stored.
    offset = 8

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """Returns the non-negative codes of words [rows, columns]. The words are unpacked along the
        columns."""
        return nibbles_of_words(words)

    def codes(self) -> torch.Tensor:
        codes = _first(self.unpacked(self.weight_packed), self.in_features)
        return codes.to(self.weight_scale.dtype) - self.offset

    def zeros(self) -> torch.Tensor | None:
        if (packed := getattr(self, "weight_zero_point", None)) is None:
            return None
        zeros = _first(self.unpacked(packed.t()), self.out_features).t()
        return zeros.to(torch.int32) - self.offset


class PackedBytesLinear(PackedLinear):
    """A linear of 8-bit codes. Each word has four codes along K, and a stored code is 128 more than
    its value."""

    offset = 128

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        return bytes_of_words(words)


def _first(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the codes of each row without the padding of its last word."""
    return codes if codes.shape[-1] == count else codes[:, :count]


def is_compressed(module: nn.Module) -> bool:
    """Whether compressed-tensors has compressed a module."""
    return _status(module) == "compressed"


def _status(module: nn.Module) -> str:
    status = getattr(module, "quantization_status", None)
    return _text(status) if type(status).__name__ == "QuantizationStatus" else ""


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for
    other libraries' modules."""
    if _status(module) == "decompressed":
        return (
            "its codes are gone because the model ran before `prepare`; call `prepare` before "
            "the first forward pass"
        )
    if not is_compressed(module):
        return None
    scheme: Any = module.quantization_scheme
    if keys_and_values_of(module) is not None:
        return None  # a hook of the module rounds its results
    if type(module) is not nn.Linear:
        return f"`prepare` reads nn.Linear of compressed-tensors, not {type(module).__name__}"
    if scheme.output_activations is not None:
        return "its results are quantised"
    weights = scheme.weights
    if weights is None:
        return "its weights are not quantised"
    if getattr(module, "weight_g_idx", None) is not None:
        return (
            "its columns are in another order (actorder), and its groups do not follow this order"
        )
    if _is_moved(module):
        return (
            "its tensors are moved to the device for each call; load the whole model on the device"
        )
    kind = _KINDS.get(
        (_text(weights.type), weights.num_bits, "weight_packed" in module._parameters)
    )
    if kind is None:
        return (
            f"{weights.type}{weights.num_bits} weights of compressed-tensors cannot be read as "
            "codes; CompressedTensorsConfig(dequantize=True) makes them dense while they are loaded"
        )
    scale: Any = module.weight_scale
    if weights.num_bits == 8 and not scale.is_floating_point():
        return "its scales are exponents (MXFP8), which `prepare` does not read"
    rounds = getattr(module, "quantization_enabled", True)
    rounding = _rounding(scheme.input_activations if rounds else None)
    if isinstance(rounding, str):
        return rounding
    block = tuple(weights.block_structure or (1, 1))
    return kind(module, rounding, _text(weights.strategy), block)


_KINDS: dict[tuple[str, int, bool], type[CompressedLinear]] = {
    ("float", 8, False): CompressedLinear,
    ("int", 8, False): CompressedLinear,
    ("int", 4, False): CompressedLinear,  # one byte for each code
    ("int", 4, True): PackedLinear,
    ("int", 8, True): PackedBytesLinear,
    ("float", 4, True): FloatLinear,
}


def _is_moved(module: nn.Module) -> bool:
    """Whether the library keeps a module's tensors on another device, and moves them to the device
    in each call."""
    kept: Any = module._parameters
    here, there = (getattr(kept, f"{side}_device", None) for side in ("onload", "offload"))
    return there is not None and str(here) != str(there)


def _rounding(args: Any) -> Rounding | str | None:
    """Returns how the library rounds activations, or the reason why this rounding cannot be read.
    Returns None if the library does not round activations."""
    if args is None:
        return None
    if not args.symmetric:
        return "its activations have zero points"
    if (_text(args.type), args.num_bits) not in _LIMITS:
        return f"its activations are {args.type}{args.num_bits}"
    if args.num_bits == 8 and args.scale_dtype == torch.uint8:
        return "the scales of its activations are exponents (MXFP8), which `prepare` does not read"
    strategy = _text(args.strategy)
    if strategy not in ("token", "tensor", "group", "tensor_group"):
        return f"its activations are rounded per {strategy}"
    dynamic = args.dynamic if isinstance(args.dynamic, bool) else _text(args.dynamic)
    return Rounding(
        _text(args.type),
        args.num_bits,
        strategy,
        dynamic,
        args.group_size or 0,
        args.scale_dtype,
    )


def _text(value: Any) -> str:
    """Returns the word of an option. The option is a string or a member of an enumeration."""
    return str(getattr(value, "value", value))


@dataclass(frozen=True)
class RoundedKeysAndValues:
    """A cache that rounds keys and values before it stores them, as the library's
    `QuantizedKVCache` does. `scales` are the scales of keys and of values."""

    cache: Any
    scales: tuple[torch.Tensor, torch.Tensor]
    rounding: Rounding

    def update(self, keys: torch.Tensor, values: torch.Tensor, *others: Any, **named: Any) -> Any:
        low, high = _LIMITS[self.rounding.kind, self.rounding.bits]
        keys, values = (
            _nearest((x / scale).clamp(low, high), self.rounding) * scale
            for x, scale in zip((keys, values), self.scales, strict=True)
        )
        return self.cache.update(keys, values, *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def keys_and_values_of(attention: nn.Module) -> Rounding | None:
    """Returns how the library rounds the keys and values of an attention, if each of the two has
    one scale. Returns None if the library does not round them, or rounds in another way."""
    children, scheme = attention._modules, getattr(attention, "quantization_scheme", None)
    if "kv_cache" not in children or "impl" in children or scheme is None:
        return None
    rounding = _rounding(scheme.input_activations)
    if not isinstance(rounding, Rounding) or rounding.dynamic is not False:
        return None
    return rounding if rounding.strategy == "tensor" else None


def with_plain_rounding(model: nn.Module) -> list[Callable[[], None]]:
    """Replaces the library's hooks that round keys and values by hooks that Dynamo can trace.
    Returns functions that put the old hooks back."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for number, hook in hooks.items():
            if getattr(hook, "__name__", "") == "_kv_cache_attention_hook":
                undo.append(partial(hooks.__setitem__, number, hook))
                hooks[number] = _rounds_keys_and_values
    return undo


def _rounds_keys_and_values(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rounds keys and values in a hook that runs before an attention.

    A cache that stores eight bits (`PagedLayer.stored`) rounds numbers itself, and a number must be
    rounded only once. Therefore the hook changes nothing for such a cache.
    """
    name, cache = cache_in(kwargs)
    rounding = keys_and_values_of(module)
    if cache is None or rounding is None:
        return args, kwargs
    layers = getattr(cache, "layers", ())  # the memory of continuous batching has none
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if getattr(layer, "stored", None) is None:
        scales = module.k_scale, module.v_scale
        kwargs = kwargs | {name: RoundedKeysAndValues(cache, scales, rounding)}
    return args, kwargs


def without_decompression(model: nn.Module) -> list[Callable[[], None]]:
    """Removes the hooks that decompress all modules in the first forward pass of a model. Returns
    functions that put the hooks back."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if (handle := getattr(module, "ct_decompress_hook", None)) is not None:
            hooks = module._forward_pre_hooks
            if (hook := hooks.pop(handle.id, None)) is not None:
                undo.append(partial(hooks.__setitem__, handle.id, hook))
    return undo
