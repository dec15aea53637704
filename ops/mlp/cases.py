"""Sample inputs of linears. The cases are small and random, and together they use every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK, ACTIVATION_CODES
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.formats.sample_codes import CodedCase, sample_codes, sample_factors
from tilewright.ops.sampling import RowsCase, Sampler


@dataclass(frozen=True)
class LinearCase(CodedCase):
    """One case of `linear_activation` or `linear_residual`.

    Attributes:
        name: The name of the case.
        num_tokens: The number of tokens, T.
        k: The number of columns of x, K.
        n: The number of rows of each weight, N.
        layout: How the weights are stored: "separate" tensors, "halves" of one tensor, "up_first"
            halves, "interleaved" rows of one tensor, or "n_major" tensors, in which the rows are
            contiguous. A single weight is "plain", or "plain_n_major" if the rows are contiguous.
        bias: Whether the linear has a bias.
        activation, norm_offset, scale: The arguments of the op with the same names.
        norm: The kind of norm: "rms", "weightless" (an RMS norm without a weight), "layer" (with a
            weight and a bias), "layer_unbiased" (with a weight), "layer_bare" (without both), or
            "" for none.
    """

    name: str
    num_tokens: int = 5
    k: int = 64
    n: int = 48
    layout: str = "plain"
    bias: bool = False
    activation: str = "silu"
    norm: str = ""
    norm_offset: float = 0.0
    scale: float = 1.0


_HALF = {"dtype": torch.float16}
_GPTQ: dict[str, Any] = {"weight_format": "int4_k", "zeros": "packed", "zero_point": 1}
_NVFP4: dict[str, Any] = {"weight_format": "nvfp4", "words": torch.uint8, "scale_block": (1, 16)}
_MXFP4: dict[str, Any] = {"weight_format": "mxfp4", "words": torch.uint8, "scale_block": (1, 32)}
_TABLE: dict[str, Any] = {
    "words": torch.uint8,
    "nibble_order": (1, 0),
    "scale_block": (1, 64),
    "scale_dtype": torch.float32,
}
_OFFSET: dict[str, Any] = {"weight_format": "int4_k_offset", "words": torch.uint8,
                           "zeros": "float", "zero_point": 8}  # fmt: skip
# The sizes of a case with more tokens than the streaming kernels compute, and with numbers of rows
# and columns that do not fill a tile.
_MOST: dict[str, Any] = {"num_tokens": 140, "k": 288, "n": 136}
_AWQ: dict[str, Any] = {"weight_format": "int4_n", "zeros": "packed", "nibble_order": AWQ_ORDER}
# Formats as checkpoints store them, and each format for which a kernel has separate code.
CODED: dict[str, dict[str, Any]] = {
    "int8": {"weight_format": "int8", "scale_block": (1, 192), "k": 192},
    "int8_zeros": {"weight_format": "int8", "scale_block": (1, 32), "zeros": "int", **_HALF},
    "int8_unsigned": {"weight_format": "int8", "words": torch.uint8, "scale_block": (1, 64),
                      "zero_point": 128},
    "fp8": {"weight_format": "fp8", "scale_block": (1, 1032), "k": 1032, "n": 80},
    "fp8_tensor": {"weight_format": "fp8", "scale_block": (96, 64), "n": 96},
    "fp8_blocks": {"weight_format": "fp8", "scale_block": (32, 128), "k": 320, "n": 80},
    "int4": {"weight_format": "int4_k", "scale_block": (1, 32), "zero_point": 8, "k": 160},
    "int4_bytes": {"weight_format": "int4_k", "words": torch.uint8, "nibble_order": (1, 0),
                   "scale_block": (1, 64), "zero_point": 8, "k": 192},
    "int4_in_bytes": {"weight_format": "int4_k", "words": torch.uint8, "scale_block": (1, 64),
                      "zeros": "float", "k": 128},
    "gptq": {**_GPTQ, "scale_block": (1, 128), "k": 384, "layout": "n_major", **_HALF},
    "awq": {**_AWQ, "scale_block": (1, 64), "k": 192, "n": 80, "layout": "n_major"},
    "awq_rows": {**_AWQ, "scale_block": (1, 64)},
    "int4_n_bytes": {"weight_format": "int4_n", "words": torch.uint8, "scale_block": (1, 64),
                     "zeros": "float"},
    "odd_groups": {"weight_format": "int8", "scale_block": (1, 24), "k": 96},
    "nvfp4": {**_NVFP4, "k": 192},
    "nvfp4_factor": {**_NVFP4, "k": 320, "n": 80, "factor": True},
    "int8_factor": {"weight_format": "int8", "scale_block": (1, 128), "k": 128, "factor": True,
                    **_HALF},
    "nvfp4_floats": {**_NVFP4, "scale_dtype": torch.float32, **_HALF},
    "mxfp4": {**_MXFP4, "k": 160, "n": 80},
    "nf4": {**_TABLE, "weight_format": "nf4", "k": 192},
    "nf4_n_major": {**_TABLE, "weight_format": "nf4", "layout": "n_major", **_HALF},
    "fp4": {**_TABLE, "weight_format": "fp4", "n": 80, "k": 320},
    "mxfp4_half": {**_MXFP4, "nibble_order": (1, 0), **_HALF},
    "int4_offset": {**_OFFSET, "scale_block": (1, 64), "k": 192, "factor": True},
    "int4_offset_rows": {**_OFFSET, "scale_block": (1, 128), "k": 128, "zero_point": 17, **_HALF},
}  # fmt: skip


def _coded(layout: str) -> tuple[LinearCase, ...]:
    """Returns a case for each format. Every second case has a norm, and the other cases have a
    bias."""
    found = []
    for number, (name, changes) in enumerate(CODED.items()):
        given: dict[str, Any] = {"layout": layout, "bias": number % 2 == 0}
        given |= {"num_tokens": (1, 5, 17)[number % 3], **changes}
        if layout == "plain" and given["layout"] == "n_major":
            given["layout"] = "plain_n_major"
        normed = number % 2 and given.get("dtype") != torch.float16 and layout != "plain"
        found.append(LinearCase(name, **given, norm="rms" if normed else ""))
    return tuple(found)


ACTIVATION_CASES = (
    LinearCase("separate", layout="separate"),
    LinearCase("split", layout="separate", num_tokens=1, k=1032, n=80, norm="rms"),
    LinearCase("packed", layout="halves", activation="gelu_tanh", dtype=torch.float16, bias=True),
    LinearCase("up_first", layout="up_first", num_tokens=17, activation="gelu", norm="rms",
               norm_offset=1.0),
    LinearCase("interleaved", layout="interleaved", norm="weightless", bias=True, num_tokens=64),
    LinearCase("n_major", layout="n_major", activation="relu", k=520),
    LinearCase("plain", activation="relu_squared", bias=True, norm="rms", num_tokens=33),
    LinearCase("many_tokens", layout="halves", num_tokens=70, norm="rms", bias=True),
    LinearCase("many_plain", num_tokens=70, activation="gelu"),
    LinearCase("no_tokens", num_tokens=0, layout="separate"),
    LinearCase("half_normed", dtype=torch.float16, norm="rms"),
    LinearCase("layer", num_tokens=1, k=1032, n=80, norm="layer", activation="gelu_tanh",
               bias=True),
    LinearCase("layer_gated", layout="halves", num_tokens=1, norm="layer_unbiased",
               norm_offset=1.0),
    LinearCase("layer_half", num_tokens=1, dtype=torch.float16, norm="layer_bare"),
    LinearCase("layer_apart", norm="layer", bias=True),
    LinearCase("layer_codes", num_tokens=1, layout="separate", weight_format="int8",
               scale_block=(1, 64), norm="layer"),
    LinearCase("layer_float", dtype=torch.float32, norm="layer"),
    LinearCase("float", dtype=torch.float32, layout="separate", norm="rms"),
    LinearCase("double", dtype=torch.float64, layout="halves"),
    *_coded("separate"),
    LinearCase("fp8_halves", layout="halves", weight_format="fp8", scale_block=(1, 64),
               norm="rms"),
    LinearCase("coded_plain", weight_format="int8", scale_block=(1, 64), activation="gelu"),
    LinearCase("coded_many", num_tokens=70, layout="separate", weight_format="fp8",
               scale_block=(1, 64)),
    LinearCase("alone", activation="", bias=True),
    LinearCase("alone_many", num_tokens=70, activation="", norm="rms"),
    LinearCase("alone_codes", num_tokens=3, activation="", norm="rms", weight_format="int4_k",
               scale_block=(1, 32), zero_point=8, k=160),
    LinearCase("alone_codes_many", activation="", weight_format="fp8", scale_block=(1, 32),
               **_MOST),
    LinearCase("coded_most", layout="halves", norm="rms", bias=True, weight_format="int4_k",
               scale_block=(1, 32), zero_point=8, **_MOST),
)  # fmt: skip
RESIDUAL_CASES = (
    LinearCase("plain"),
    LinearCase("split", num_tokens=3, k=2056, n=80, bias=True),
    LinearCase("scaled", num_tokens=17, scale=0.22, bias=True, dtype=torch.float16),
    LinearCase("n_major", layout="plain_n_major", num_tokens=64, k=520),
    LinearCase("many_tokens", num_tokens=70, scale=0.22),
    LinearCase("no_tokens", num_tokens=0),
    LinearCase("float", dtype=torch.float32),
    LinearCase("double", dtype=torch.float64, bias=True),
    LinearCase("normed", num_tokens=1, norm="rms", k=1032, n=80),
    LinearCase("normed_split", num_tokens=2, norm="rms", k=2056, n=80, norm_offset=1.0, bias=True),
    LinearCase("normed_after", num_tokens=17, norm="rms", dtype=torch.float16),
    LinearCase("normed_wide", num_tokens=3, norm="weightless", n=2064, scale=0.22),
    LinearCase("normed_many", num_tokens=70, norm="rms", bias=True, norm_offset=1.0, scale=0.5),
    LinearCase("normed_codes", num_tokens=1, norm="rms", weight_format="int8", scale_block=(1, 64)),
    *_coded("plain"),
    LinearCase("coded_many", num_tokens=70, weight_format="fp8", scale_block=(1, 64), scale=0.22),
    LinearCase("coded_most", **_MOST, **_NVFP4, factor=True, bias=True, scale=0.22),
    LinearCase("coded_double", dtype=torch.float64, weight_format="int8", scale_block=(1, 64)),
)


def _linear(case: LinearCase, sampler: Sampler) -> dict[str, Any]:
    """Returns the arguments that both ops have, by name."""
    return {
        "x": sampler.normal(case.num_tokens, case.k, dtype=case.dtype),
        **_weight(case, sampler, "weight"),
        "bias": _bias(case, sampler),
        **case.format_options,
    }


def sample_activation(case: LinearCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `linear_activation` by name."""
    given = _linear(case, Sampler(device, seed))
    sampler = Sampler(device, seed + 1)
    given |= {
        "activation": case.activation,
        **_norm(case, sampler, case.k),
    }
    if case.layout.startswith("plain"):
        return given
    made = _weight(case, sampler, "weight"), _weight(case, sampler, "up_weight")
    gate, up = made[0]["weight"], made[1]["up_weight"]
    if case.layout == "halves":
        gate, up = torch.cat((gate, up)).chunk(2)
    elif case.layout == "up_first":
        up, gate = torch.cat((up, gate)).chunk(2)
    elif case.layout == "interleaved":
        joint = torch.stack((gate, up), 1).flatten(0, 1)
        gate, up = joint[0::2], joint[1::2]
    weights = {**made[0], **made[1], "weight": gate, "up_weight": up}
    return given | weights | {"up_bias": _bias(case, sampler)}


def sample_residual(case: LinearCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `linear_residual` by name."""
    given = _linear(case, Sampler(device, seed))
    sampler = Sampler(device, seed + 1)
    given["residual"] = sampler.normal(case.num_tokens, case.n, dtype=case.dtype)
    return given | {"scale": case.scale, **_norm(case, sampler, case.n)}


@dataclass(frozen=True)
class ScaledCase(CodedCase):
    """One case of `scaled_linear`. x_scale: the shape of x's scale, with "tokens" for T and
    "blocks" for K / 128. It is empty if there is no scale. The field `dtype` is the op's
    out_dtype."""

    name: str
    x_scale: tuple[Any, ...] = (1, 1)
    num_tokens: int = 5
    k: int = 256
    n: int = 128
    bias: bool = False


_FP8: dict[str, Any] = {"weight_format": "fp8"}
_FP8_HALF: dict[str, Any] = {**_FP8, **_HALF}
_BY_TOKEN, _BY_BLOCK = ("tokens", 1), ("tokens", "blocks")
SCALED_CASES = (
    ScaledCase("tensors", **_FP8, scale_block=(128, 256)),
    ScaledCase("no_x_scale", **_FP8, scale_block=(128, 256), x_scale=(), bias=True),
    ScaledCase("rows", **_FP8, scale_block=(1, 256), x_scale=_BY_TOKEN, num_tokens=70),
    ScaledCase("half_rows", **_FP8_HALF, scale_block=(1, 272), k=272, n=80, bias=True),
    ScaledCase("token_by_tensor", **_FP8, scale_block=(96, 64), k=64, n=96, x_scale=_BY_TOKEN,
               num_tokens=1),
    ScaledCase("rows_in_blocks", **_FP8, scale_block=(32, 128), k=128, n=80, x_scale=_BY_TOKEN),
    ScaledCase("blocks", **_FP8, scale_block=(128, 128), k=640, n=384, x_scale=_BY_BLOCK),
    ScaledCase("blocks_shared", **_FP8, scale_block=(128, 128), num_tokens=8, bias=True),
    ScaledCase("odd_blocks", **_FP8, scale_block=(32, 128), x_scale=_BY_BLOCK),
    ScaledCase("odd_sizes", **_FP8, scale_block=(1, 100), k=100, n=70, x_scale=_BY_TOKEN),
    ScaledCase("float", **_FP8, scale_block=(1, 256), x_scale=_BY_TOKEN, dtype=torch.float32),
    ScaledCase("no_tokens", **_FP8, scale_block=(1, 256), x_scale=_BY_TOKEN, num_tokens=0),
)  # fmt: skip


def sample_scaled(case: ScaledCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `scaled_linear` by name."""
    sampler = Sampler(device, seed)
    codes = sampler.normal(case.num_tokens, case.k, dtype=torch.float32, scale=60.0)
    weight, weight_scale, _ = sample_codes(case, sampler, case.n, case.k)
    sizes = {"tokens": case.num_tokens, "blocks": -(-case.k // ACTIVATION_BLOCK)}
    shape = [sizes.get(size, size) for size in case.x_scale]
    return {
        "x": codes.clamp(-448, 448).to(ACTIVATION_CODES),
        "weight": weight,
        "weight_scale": weight_scale,
        "x_scale": sampler.scales(*shape, size=1 / 60) if shape else None,
        "bias": sampler.normal(case.n, dtype=case.dtype) if case.bias else None,
        "scale_block": list(case.scale_block),
        "out_dtype": case.dtype,
        "weight_format": case.weight_format,
    }


@dataclass(frozen=True)
class RoundCase(RowsCase):
    """One case of `round_rows`. up: whether x is gated. scale: the dtype of a given scale. The
    other fields have the names of the op's arguments."""

    norm: str = ""
    up: bool = False
    scale: torch.dtype | None = None
    activation: str = ""
    group: int = 0
    rounded: bool = False
    zero_scale: float = 0.0
    least: float = 0.0
    least_divisor: float = 0.0
    decoded: bool = False


_CT: dict[str, Any] = {"rounded": True, "zero_scale": 2.0**-7}
_BLOCKS: dict[str, Any] = {"group": 128, "n": 384}
ROUND_CASES = (
    RoundCase("token", **_CT),
    RoundCase("token_decoded", **_CT, decoded=True, num_tokens=1, n=200),
    RoundCase("normed", **_CT, norm="rms", n=1032),
    RoundCase("normed_decoded", **_CT, norm="rms", decoded=True, norm_dtype=torch.float32),
    RoundCase("gemma", **_CT, norm="rms", norm_offset=1.0, num_tokens=17, n=600),
    RoundCase("weightless", norm="weightless", least_divisor=1e-12),
    RoundCase("blocks", **_CT, **_BLOCKS),
    RoundCase("blocks_decoded", **_BLOCKS, least_divisor=1e-12, decoded=True),
    RoundCase("blocks_normed", **_CT, **_BLOCKS, norm="rms"),
    RoundCase("one_block", **_CT, group=64, num_tokens=2, dtype=torch.float16),
    RoundCase("gated", **_CT, up=True, activation="silu", n=1096, decoded=True),
    RoundCase("gated_blocks", **_BLOCKS, up=True, activation="gelu_tanh", least=1e-6),
    RoundCase("activated", rounded=True, least=1e-6, activation="relu_squared", stride=96, n=72),
    RoundCase("given", rounded=True, scale=torch.bfloat16, n=200, decoded=True),
    RoundCase("given_normed", scale=torch.float32, norm="rms", num_tokens=1),
    RoundCase(
        "given_gated",
        rounded=True,
        scale=torch.float16,
        dtype=torch.float16,
        up=True,
        activation="silu",
    ),
    RoundCase("no_tokens", **_CT, num_tokens=0),
    RoundCase("float", dtype=torch.float32, group=32, least=1e-6),
    RoundCase("double", dtype=torch.float64, norm="rms", zero_scale=1e-3),
)


def sample_round(case: RoundCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `round_rows` by name. The second row of x is zero."""
    sampler = Sampler(device, seed)
    x = case.rows(sampler)
    x[1:2] = 0
    up = sampler.normal(case.num_tokens, case.n, dtype=case.dtype) if case.up else None
    names = ("activation", "group", "rounded", "zero_scale", "least", "least_divisor", "decoded")
    given = {"x": x, "up": up, "rms_norm": bool(case.norm), **case.norm_arguments(sampler)}
    if case.scale is not None:
        given["scale"] = sampler.scales(1, size=1 / 256, dtype=case.scale)
    return given | {name: getattr(case, name) for name in names}


def _weight(case: LinearCase, sampler: Sampler, name: str) -> dict[str, torch.Tensor]:
    """Returns a weight under the name of its argument. If it is quantised, also returns its scale
    and zero."""
    if case.weight_format == "dense":
        made = [sampler.normal(case.n, case.k, dtype=case.dtype, scale=case.k**-0.5)]
    else:
        made = list(sample_codes(case, sampler, case.n, case.k))
        made = made[: 2 if case.zeros == "none" else 3]
    if case.layout.endswith("n_major"):
        made = [one.mT.contiguous().mT for one in made]
    prefix = name.removesuffix("_weight")
    given = dict(zip((name, f"{prefix}_scale", f"{prefix}_zero"), made, strict=False))
    return given | ({f"{prefix}_factor": sample_factors(sampler, 1)} if case.factor else {})


def _norm(case: LinearCase, sampler: Sampler, width: int) -> dict[str, Any]:
    layer = case.norm.startswith("layer")
    given: dict[str, Any] = {"norm_offset": case.norm_offset}
    if case.norm:
        given["layer_norm" if layer else "rms_norm"] = True
    if case.norm in ("rms", "layer", "layer_unbiased"):
        given["norm_weight"] = sampler.normal(width, dtype=case.dtype) + (1 - case.norm_offset)
    if case.norm == "layer":
        given["norm_bias"] = sampler.normal(width, dtype=case.dtype)
    return given


def _bias(case: LinearCase, sampler: Sampler) -> torch.Tensor | None:
    return sampler.normal(case.n, dtype=case.dtype) if case.bias else None
