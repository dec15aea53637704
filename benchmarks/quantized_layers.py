"""Makes the quantised layers that the benchmarks share: checkpoint formats with random codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from qkv_shapes import COLD_BYTES, Cache, Shape, normal

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.formats.quantized_weight import AWQ_ORDER
from tilewright.ops.formats.sample_codes import stored_scales
from tilewright.ops.formats.weight import Weight
from tilewright.ops.qkv.arguments import FusedQkvArguments

SHAPES = (
    Shape("llama3-8b", 4096, 32, 8),
    Shape("llama3-70b", 8192, 64, 8),
    Shape("qwen3-30b-a3b", 2048, 32, 4, norm=True),
    Shape("gpt-oss-20b", 2880, 64, 8, 64),
)
WITH_BIAS = ("gpt-oss-20b",)


@dataclass(frozen=True)
class Format:
    """The storage format of a layer's weights.

    block: the rows and columns that share a scale; 0 stands for all of them.
    transposed: whether weights are [K, N] in memory, as in GPTQ and AWQ.
    prepared: whether the codes of a transposed format, but not its scales and zeros, lie along K,
        as `tilewright.compiler.prepare` stores them.
    order: the place of each code in its word; empty for ascending order.
    x: "bf16", or fp8 with scales by "token" or by "block" of 128 columns.
    """

    name: str
    weight_format: str
    block: tuple[int, int]
    transposed: bool = False
    zeros: bool = False
    prepared: bool = False
    order: tuple[int, ...] = ()
    x: str = "bf16"

    def scale_block(self, rows: int, columns: int) -> list[int]:
        if self.weight_format == "dense":
            return []
        width = self.block[1] or columns
        while self.weight_format.startswith("int4") and columns % width:
            width //= 2  # gpt-oss's 2880 columns are not a multiple of 128
        return [self.block[0] or rows, width]

    @property
    def zero_point(self) -> int:
        return 8 if self.weight_format.startswith("int4") and not self.zeros else 0

    @property
    def nibble_order(self) -> list[int]:
        return list(self.order)


FORMATS = (
    Format("int4", "int4_k", (1, 128)),
    Format("gptq", "int4_k", (1, 128), transposed=True, zeros=True),
    Format("awq", "int4_n", (1, 128), transposed=True, zeros=True, order=AWQ_ORDER),
    Format("gptq_prepared", "int4_k", (1, 128), transposed=True, zeros=True, prepared=True),
    Format(
        "awq_prepared",
        "int4_k",
        (1, 128),
        transposed=True,
        zeros=True,
        prepared=True,
        order=AWQ_ORDER,
    ),
    Format("int4_zeros", "int4_k", (1, 128), zeros=True),
    Format("int8", "int8", (1, 0)),
    Format("fp8", "fp8", (1, 0)),
    Format("fp8_block", "fp8", (128, 128)),
    Format("nvfp4", "nvfp4", (1, 16)),
    Format("mxfp4", "mxfp4", (1, 32)),
    Format("nf4", "nf4", (1, 64), order=(1, 0)),
    Format("fp8_fp8", "fp8", (1, 0), x="token"),
    Format("fp8_fp8_block", "fp8", (128, 128), x="block"),
)
BY_NAME = {form.name: form for form in FORMATS}
WEIGHT_ONLY = [form.name for form in FORMATS if form.x == "bf16"]


@dataclass(frozen=True)
class Projection:
    """One stored weight [N, K] with its scales and zeros. A dense weight has neither."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.weight, self.scale, self.zero) if t is not None]


@dataclass(frozen=True)
class QuantizedLayer:
    """The input, the projections of q, k and v, the biases, the norms and the rope tables of one
    layer."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    parts: tuple[Projection, Projection, Projection]
    biases: tuple[torch.Tensor, ...] | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    cos: torch.Tensor
    sin: torch.Tensor


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")


def _fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def _turned(form: Format, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if form.transposed else tensor


def make_projection(form: Format, rows: int, hidden: int) -> Projection:
    """Returns a projection of random codes. Its values are about as large as 1 / sqrt(hidden)."""
    block = form.scale_block(rows, hidden)
    grid = (-(-rows // block[0]), -(-hidden // block[1]))
    if WEIGHT_FORMATS[form.weight_format].number:
        weight = torch.randint(0, 256, (rows, hidden // 2), device="cuda").to(torch.uint8)
        size = 0.45 if form.weight_format == "nf4" else 3.0
    elif form.weight_format == "int4_k":
        weight, size = _words(rows, hidden // 8), 4.6
    elif form.weight_format == "int4_n":
        weight, size = _words(rows // 8, hidden), 4.6
    elif form.weight_format == "int8":
        weight, size = torch.randint(-128, 128, (rows, hidden), device="cuda").to(torch.int8), 74.0
    else:
        weight, size = _fp8(rows, hidden), 1.0
    scale = (0.5 + torch.rand(grid, device="cuda")) * hidden**-0.5 / size
    if form.weight_format.startswith("int4"):
        scale = scale.bfloat16()
    elif WEIGHT_FORMATS[form.weight_format].scales:
        scale = stored_scales(WEIGHT_FORMATS[form.weight_format], scale, None)
    zero = _turned(form, _words(grid[0] // 8, grid[1])) if form.zeros else None
    return Projection(
        weight if form.prepared else _turned(form, weight), _turned(form, scale), zero
    )


def stored_weight(form: Format, part: Projection) -> Weight:
    """Returns a projection as the `Weight` that the ops read."""
    weight = Weight(
        part.weight,
        form.weight_format,
        part.scale,
        zero=part.zero,
        zero_point=form.zero_point,
        nibble_order=form.nibble_order,
    )
    return replace(weight, scale_block=form.scale_block(weight.rows, weight.shape[-1]))


def make_quantized(form: Format, shape: Shape, num_tokens: int) -> QuantizedLayer:
    dim, hidden = shape.head_dim, shape.hidden
    rows = [heads * dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    x, x_scale = normal(num_tokens, hidden), None
    if form.x != "bf16":
        x = _fp8(num_tokens, hidden)
        columns = 1 if form.x == "token" else -(-hidden // 128)
        x_scale = 0.5 + torch.rand(num_tokens, columns, device="cuda")
    angles = torch.randn(num_tokens, dim // 2, device="cuda").repeat(1, 2)
    biased = shape.name in WITH_BIAS
    return QuantizedLayer(
        x,
        x_scale,
        tuple(make_projection(form, n, hidden) for n in rows),  # type: ignore[arg-type]
        tuple(normal(n) for n in rows) if biased else None,
        (normal(dim), normal(dim)) if shape.norm else None,
        angles.cos().bfloat16(),
        angles.sin().bfloat16(),
    )


def argument_sets(form: Format, shape: Shape, num_tokens: int) -> int:
    """Returns the number of layers that keeps the L2 cache cold."""
    weights = shape.weight_bytes * WEIGHT_FORMATS[form.weight_format].bits / 16
    return max(2, -(-int(COLD_BYTES) // int(weights + 2 * num_tokens * shape.hidden)))


def quantized_arguments(
    form: Format, shape: Shape, layer: QuantizedLayer, cache: Cache
) -> FusedQkvArguments:
    """Returns the op's arguments for one layer's step."""
    rows = layer.parts[0].weight.shape[0] // shape.num_heads
    window = cache.window.to_ints()
    options: dict[str, Any] = {}
    for letter, part in zip("qkv", layer.parts, strict=True):
        options[f"{letter}_weight"] = part.weight.unflatten(0, (-1, rows))
        options[f"{letter}_scale"] = part.scale
        options[f"{letter}_zero"] = part.zero
    if layer.biases is not None:
        for letter, bias in zip("qkv", layer.biases, strict=True):
            options[f"{letter}_bias"] = bias.unflatten(0, (-1, shape.head_dim))
    q_norm, k_norm = layer.norms or (None, None)
    # The block of the largest projection also fits the smaller ones.
    block = form.scale_block(shape.num_heads * shape.head_dim, shape.hidden)
    return FusedQkvArguments(
        layer.x,
        k_cache=cache.keys,
        v_cache=cache.values,
        slot_mapping=cache.slots[: layer.x.shape[0]],
        k_window=window,
        v_window=window,
        q_norm_weight=q_norm,
        k_norm_weight=k_norm,
        cos=layer.cos,
        sin=layer.sin,
        rotary_dim=shape.head_dim,
        rope_style="half",
        weight_format=form.weight_format,
        scale_block=block,
        nibble_order=form.nibble_order,
        zero_point=form.zero_point,
        x_scale=layer.x_scale,
        out_dtype=None if form.x == "bf16" else torch.bfloat16,
        **options,
    )
