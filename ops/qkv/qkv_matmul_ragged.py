"""`fused_qkv_matmul_kv_cache_paged_ragged`: Modular MAX's op of that name, on the kernels of
`fused_qkv_paged`.

The projection is rounded once, to the result's or the cache's dtype. MAX rounds to its output dtype
first, adds the bias in that dtype and so rounds twice; it takes GPTQ scales as bf16, cut off, where
they are fp16 here. No rope and no norm, as there.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import Any, TypeAlias

import torch

from tilewright.ops.cache.address_checks import check_address_values
from tilewright.ops.cache.checks import check_aliases
from tilewright.ops.checks import ArgumentError, in_words_of, readable
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.gptq_buffer import SYMMETRIC_ZERO, sections
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.arguments import FusedQkvArguments, RaggedQkvArguments
from tilewright.ops.qkv.obstacles import STEPS, projection_obstacle
from tilewright.ops.qkv.ragged_checks import NAME, check_metadata, kv_rows
from tilewright.ops.qkv.ragged_samples import RAGGED_CASES, sample_ragged
from tilewright.ops.reference.tolerances import ONE_ROUNDING, TOLERANCES
from tilewright.ops.sampling import sampler_of

#: The first row of q, k and v in the weight, and the first behind.
Rows: TypeAlias = dict[str, tuple[int, int]]
#: What the arguments of `fused_qkv_paged` are called here.
FUSED_WORDS = {
    "x": "hidden_state",
    "x_scale": "input_scale",
    "scale_block": "group_size",
    "k_cache": "blocks",
    "k_window": "blocks",
    "v_window": "blocks",
    "row_offsets": "input_row_offsets",
    **{f"{letter}_weight": "weight" for letter in "qkv"},
    **{f"{letter}_scale": "weight_scale" for letter in "qkv"},
    **{f"{letter}_zero": "weight" for letter in "qkv"},
    **{f"{letter}_bias": "bias" for letter in "qkv"},
}


def validate(a: RaggedQkvArguments) -> None:
    check_metadata(a)
    sizes = (*a.weight.shape, *a.blocks.shape, a.hidden_state.shape[1])
    # Weights of unknown size cannot be split; the same check decides at run time.
    if all(isinstance(size, int) for size in sizes):
        with in_words_of(NAME, FUSED_WORDS):
            qkv_cache.validate(as_fused_qkv(a))


def validate_values(a: RaggedQkvArguments) -> None:
    fused = as_fused_qkv(a)
    windows = [window for window in (fused.k_window, fused.v_window) if window]
    check_aliases(NAME, a, [("blocks", a.blocks, window) for window in windows])
    if readable((a.input_row_offsets, a.cache_lengths, a.lookup_table)):
        window = CacheWindow.from_ints(fused.k_window)
        with in_words_of(NAME, FUSED_WORDS):
            check_address_values(NAME, fused, window, a.hidden_state.shape[0])


def fake(a: RaggedQkvArguments) -> torch.Tensor:
    dtype = a.out_dtype or a.hidden_state.dtype
    return a.hidden_state.new_empty((a.hidden_state.shape[0], _split(a)["q"][1]), dtype=dtype)


def reference(a: RaggedQkvArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 values); quantised inputs are dequantised first:

        q | k | v = hidden_state @ weight^T + bias       columns, in this order
        result = q
        p = cache_lengths[b] + i                         for token i of sequence b
        page, slot = lookup_table[b, p // page_size], p % page_size
        blocks[page, 0, layer_idx, slot] = k / k_cache_scale
        blocks[page, 1, layer_idx, slot] = v / v_cache_scale

    cache_scale_multiplies: times the scale. Each number is rounded once, when it is stored.
    """
    return qkv_cache.reference(as_fused_qkv(a)).flatten(1)


def as_fused_qkv(a: RaggedQkvArguments) -> FusedQkvArguments:
    """The same call of `fused_qkv_paged`, on views of the same tensors."""
    head_dim, rows = _head_dim(a), _split(a)
    windows = [_window(a, part, head_dim) for part in range(a.blocks.shape[1])]
    return FusedQkvArguments(
        x=a.hidden_state,
        k_cache=a.blocks,
        v_cache=None,
        slot_mapping=None,
        k_window=windows[0],
        v_window=[] if len(windows) == 1 else windows[1],
        slots="ragged",
        lookup_table=a.lookup_table,
        row_offsets=a.input_row_offsets,
        cache_lengths=a.cache_lengths,
        x_scale=_as_matrix(a.input_scale),
        out_dtype=a.out_dtype,
        k_cache_scale=a.k_cache_scale,
        v_cache_scale=a.v_cache_scale,
        cache_scale_multiplies=a.cache_scale_multiplies,
        static_tokens=a.static_tokens,
        tune=a.tune,
        **{"v_weight": None, **_weights(a, rows, head_dim)},
        **_heads("bias", a.bias, rows, head_dim),
    )


def _split(a: RaggedQkvArguments) -> Rows:
    """First row and end of q, k and (but for MLA) v in the weight."""
    total = a.weight.shape[1] if a.group_size else a.weight.shape[0]
    size, kinds = kv_rows(a.blocks), a.blocks.shape[1]
    ends = [total - size * left for left in range(kinds, -1, -1)]
    return dict(zip("qkv", pairwise([0, *ends]), strict=False))


def _head_dim(a: RaggedQkvArguments) -> int:
    """The cache's, or where q's columns are no whole heads of it (MLA), a part of it that divides
    both: without rope and norm any will do, and kernels like powers of two."""
    head_dim, q_dim = a.blocks.shape[5], _split(a)["q"][1]
    if q_dim % head_dim == 0:
        return head_dim
    common = gcd(head_dim, q_dim)
    power = common & -common
    return power if power >= 16 else common


def _window(a: RaggedQkvArguments, part: int, head_dim: int) -> list[Any]:
    view = a.blocks[:, part, a.layer_idx]
    if a.blocks.shape[1] == 1:
        view = view[:, :, :1]
    if head_dim != a.blocks.shape[5]:
        view = view.squeeze(2).unflatten(-1, (-1, head_dim))
    return CacheWindow.of(view, a.blocks).to_ints()


def _heads(what: str, whole: torch.Tensor | None, rows: Rows, head_dim: int) -> dict[str, Any]:
    """What q, k and v have of the rows of a tensor, [H, D, ...], by argument name."""
    parts = _parts(what, whole, {letter: slice(*ends) for letter, ends in rows.items()})
    return {name: part.unflatten(0, (-1, head_dim)) for name, part in parts.items()}


def _parts(what: str, whole: torch.Tensor | None, slices: dict[str, slice]) -> dict[str, Any]:
    if whole is None:
        return {}
    return {f"{letter}_{what}": whole[own] for letter, own in slices.items()}


def _weights(a: RaggedQkvArguments, rows: Rows, head_dim: int) -> dict[str, Any]:
    if a.group_size:
        return _gptq(a, rows, head_dim)
    weights = _heads("weight", a.weight, rows, head_dim)
    if a.weight_scale is None:
        return weights
    scale, block = _scale_blocks(a, rows)
    own = {x: slice(first // block[0], -(-end // block[0])) for x, (first, end) in rows.items()}
    shared = dict.fromkeys(rows, slice(None))
    scales = _parts("scale", scale, shared if scale.shape[0] == 1 else own)
    return {**weights, **scales, "weight_format": "fp8", "scale_block": block}


def _scale_blocks(a: RaggedQkvArguments, rows: Rows) -> tuple[torch.Tensor, list[int]]:
    """The weight's scales and their block, such that no block has rows of two projections."""
    scale = _as_matrix(a.weight_scale)
    assert scale is not None
    total, hidden = a.weight.shape
    if scale.numel() == 1:
        return scale, [total, hidden]
    if scale.shape[0] == total and scale.shape[1] == 1:
        return scale, [1, hidden]
    block = gcd(128, *(first for first, _ in rows.values()))
    if block < 128:
        scale = scale.repeat_interleave(128 // block, dim=0)[: -(-total // block)]
    return scale, [block, 128]


def _gptq(a: RaggedQkvArguments, rows: Rows, head_dim: int) -> dict[str, Any]:
    parts = sections(a.weight, a.hidden_state.shape[1], a.group_size, a.has_zp)
    # A word of zeros has those of eight rows.
    words = {letter: slice(first // 8, end // 8) for letter, (first, end) in rows.items()}
    return {
        "weight_format": "int4_k",
        "scale_block": [1, a.group_size],
        "zero_point": 0 if a.has_zp else SYMMETRIC_ZERO,
        **_heads("weight", parts.words, rows, head_dim),
        **_parts("scale", parts.scales, {x: slice(*ends) for x, ends in rows.items()}),
        **_parts("zero", parts.zeros, words),
    }


def _as_matrix(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale.view(1, 1) if scale is not None and scale.dim() < 2 else scale


def _unsupported(a: RaggedQkvArguments) -> str | None:
    return projection_obstacle(as_fused_qkv(a))


OP = register(
    FusedOp(
        name=NAME,
        arguments=RaggedQkvArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{STEPS}:ragged_steps", _unsupported),),
        cases=RAGGED_CASES,
        sample_inputs=sampler_of(RaggedQkvArguments, sample_ragged),
        tolerances=TOLERANCES,
        error_model=ONE_ROUNDING,
        plan=f"{STEPS}:plan_ragged",
        tuning="tilewright.ops.qkv.tuning:describe",
    )
)


def fused_qkv_matmul_kv_cache_paged_ragged(
    hidden_state: torch.Tensor,
    input_row_offsets: torch.Tensor,
    weight: torch.Tensor,
    blocks: torch.Tensor,
    cache_lengths: torch.Tensor,
    lookup_table: torch.Tensor,
    layer_idx: int | torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The op, called by hand: projects the new tokens of a ragged batch, writes K and V to their
    pages of one layer, and returns q [T, q_dim].

    hidden_state [T, K]; input_row_offsets [B + 1]; weight [N, K]; blocks [P, 2, layers, page_size,
    heads, head_dim], written; cache_lengths [B]; lookup_table [B, columns]; layer_idx: a number, or
    a tensor of one on the CPU. Options, dtypes and quantised weights: RaggedQkvArguments.
    cache_lengths is not advanced. Raises ArgumentError before anything is written. Not
    differentiable.

        >>> q = fused_qkv_matmul_kv_cache_paged_ragged(
        ...     hidden, torch.tensor([0, 3, 3, 4]), w_qkv, blocks, lengths, table, layer_idx=1)
    """
    if isinstance(layer_idx, torch.Tensor):
        if layer_idx.device.type != "cpu" or layer_idx.numel() != 1:
            actual = f"shape {list(layer_idx.shape)} on {layer_idx.device}"
            raise ArgumentError(NAME, "layer_idx", "one number on the CPU", actual)
        if layer_idx.is_floating_point() or layer_idx.is_complex():
            raise ArgumentError(NAME, "layer_idx", "an integer", layer_idx.dtype)
        layer_idx = int(layer_idx)
    tensors = (hidden_state, input_row_offsets, weight, blocks, cache_lengths, lookup_table)
    return OP.torch_op(*tensors, layer_idx, **options)
