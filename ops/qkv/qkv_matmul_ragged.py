"""`fused_qkv_matmul_kv_cache_paged_ragged`: Modular MAX's op of that name, on the kernels of
`fused_qkv_paged`.

The projection is rounded once, to the dtype of the result or of the cache. MAX first rounds the
product to the output dtype, and then adds the bias in that dtype, which rounds twice. MAX truncates
GPTQ scales to bf16; here they stay fp16. As in MAX, there is no rope and no norm.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.cache.address_checks import check_address_values
from tilewright.ops.cache.checks import check_aliases
from tilewright.ops.checks import ArgumentError, in_words_of, readable
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv import qkv_cache
from tilewright.ops.qkv.arguments import RaggedQkvArguments
from tilewright.ops.qkv.obstacles import STEPS, projection_obstacle
from tilewright.ops.qkv.ragged_as_fused import as_fused_qkv, split_rows
from tilewright.ops.qkv.ragged_checks import NAME, check_metadata
from tilewright.ops.qkv.ragged_samples import RAGGED_CASES, sample_ragged
from tilewright.ops.sampling import sampler_of

#: The names that this op uses for arguments of `fused_qkv_paged`.
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
    # If a size is a symbol, the weight cannot be split, so these checks run only at run time.
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
    return a.hidden_state.new_empty((a.hidden_state.shape[0], split_rows(a)["q"][1]), dtype=dtype)


def reference(a: RaggedQkvArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 values):

        q | k | v = hidden_state @ weight^T + bias       columns, in this order
        result = q
        p = cache_lengths[b] + i                         for token i of sequence b
        page, slot = lookup_table[b, p // page_size], p % page_size
        blocks[page, 0, layer_idx, slot] = k / k_cache_scale
        blocks[page, 1, layer_idx, slot] = v / v_cache_scale

    Quantised inputs are dequantised first. With cache_scale_multiplies, values are multiplied by
    the scales. Each number is rounded once, when it is stored.
    """
    return qkv_cache.reference(as_fused_qkv(a)).flatten(1)


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
    """Calls the op: projects the new tokens of a ragged batch, writes K and V to their pages of one
    layer, and returns q [T, q_dim].

    The arguments are hidden_state [T, K]; input_row_offsets [B + 1]; weight [N, K]; blocks [P, 2,
    layers, page_size, heads, head_dim], which is written; cache_lengths [B]; lookup_table [B,
    columns]; and layer_idx, a number or a tensor of one element on the CPU. RaggedQkvArguments
    explains options, dtypes and quantised weights. cache_lengths is not advanced. Raises
    ArgumentError before anything is written. The op is not differentiable.

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
