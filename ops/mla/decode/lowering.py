"""The steps of `mla_decode`: a product for each head, attention to latents, and another product for
each head. Calls of `mla_prefill` may use these steps too."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import INT32_MAX, cdiv, next_power_of_2
from tilewright.codegen.dequantize import DEQUANTIZE, dequantize_grid, dequantize_statics
from tilewright.codegen.formats import Quantization
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.mla.head_kernels import (
    BLOCK_K,
    BLOCK_WIDTH,
    CODED_PRODUCTS,
    HEAD_PRODUCTS,
    MOST_TOKENS,
    block_tokens,
    coded_constants,
    head_grid,
    scaled_step,
)
from tilewright.codegen.row_rounding import RowRounding
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.ops.attention.arguments import BATCH_NAMES, as_attention
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.attention.operands import RopePart
from tilewright.ops.attention.positions import sequences
from tilewright.ops.checks import given
from tilewright.ops.formats.code_operands import code_words, quantization_of
from tilewright.ops.mla.arguments import (
    FP8,
    MlaDecodeArguments,
    MlaPrefillArguments,
    halves,
    rotates_keys,
    widths,
)
from tilewright.ops.mla.decode.checks import decode_obstacle
from tilewright.ops.mla.decode.gains import is_faster
from tilewright.ops.mla.keys import buffer_rows, cache_views
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.products import multiply_batch
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Step, Steps

NAME = "absorbed attention"


def decode_steps(a: MlaDecodeArguments, target: Target) -> Steps:
    """Performs the steps of a call of `mla_decode`."""
    nope = widths(a)[0]
    return (yield from absorbed_steps(a, a.q[..., :nope], a.q[..., nope:], target))


def absorbed_steps(
    a: MlaDecodeArguments, q_nope: torch.Tensor, q_rope: torch.Tensor, target: Target
) -> Steps:
    """Performs the steps of an `mla_decode` call whose queries come in two parts, [T, H, N] and [T,
    H, R]. Only the dtype and shape of a.q are used."""
    if a.q.numel() == 0:
        out = yield Buffer((*a.q.shape[:2], a.v_dim), a.q.dtype)
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    k_weight, v_weight = yield from _head_weights(a, q_nope, target)
    q_latent = yield from head_steps(q_nope, k_weight, target)
    call = as_attention(a, q_latent, a.latent)
    rope = RopePart(q_rope, a.rope_keys, _latent_rounding(a))
    done = yield from attention_steps(call, target, rope=rope)
    assert isinstance(done.result, torch.Tensor)
    out = yield from head_steps(done.result, v_weight, target)
    return Outcome(out, NAME, f"a product of each head around {done.name} {done.reason}")


def _latent_rounding(a: MlaDecodeArguments) -> RowRounding | None:
    """Returns the rounding of latents in a call; None if latents are not rounded. If all columns of
    a latent share a scale, the group is as wide as the tile. The tile is filled up with zeros,
    which do not change the scale."""
    if not a.round_latents:
        return None
    r = a.latent_rounding
    group = r.group or next_power_of_2(a.latent.shape[2])
    return RowRounding(group, r.zero_scale, r.least, r.least_divisor)


@dataclass(frozen=True)
class HeadWeights:
    """The weights [K, W] of H heads: numbers, or float8 codes. The kernel multiplies the sum of
    each step over K by the scale that the codes of the step share. The weights are parts of the
    up-projection's weight [rows, L].

    Attributes:
        data: The numbers or codes [H, K, W].
        scale: The scales of the up-projection's weight; None if `data` has numbers.
        block: How many rows and columns of the up-projection's weight share a scale.
        head_rows: How many rows of the up-projection's weight each head has.
        first_row: The first of these rows that belongs to `data`.
        k_is_row: Whether K counts rows of the up-projection's weight, and W its columns.
        step: How many indices of K the kernel multiplies in one step of its loop.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (1, 1)
    head_rows: int = 0
    first_row: int = 0
    k_is_row: bool = False
    step: int = BLOCK_K


@dataclass(frozen=True)
class CodedHeads:
    """The weights [K, W] of H heads, as parts of an up-projection's weight of codes [rows, L].

    Attributes:
        shape: H, K and W.
        words: The codes of the whole weight, in the dtype that the kernel reads.
        scale, zero, factor: The fields of the whole Weight.
        quantization: The static data of the whole weight.
        head_rows, first_row, k_is_row: As in HeadWeights.
    """

    shape: tuple[int, int, int]
    words: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    factor: torch.Tensor | None
    quantization: Quantization
    head_rows: int
    first_row: int
    k_is_row: bool


def _head_weights(
    a: MlaDecodeArguments, q_nope: torch.Tensor, target: Target
) -> Generator[Step, Any, tuple[HeadWeights | CodedHeads, HeadWeights | CodedHeads]]:
    """Returns W_UK [H, N, L] and W_UV [H, L, V]. Codes that no kernel can multiply are
    dequantised."""
    weight = a.kv_b_weight
    if a.kv_b.is_coded:
        coded = (scaled_heads(a) or coded_heads(a)) if _suits_kernel(q_nope) else None
        if coded is not None:
            return coded
        weight = yield from _dequantized(a, target)
    k_weight, v_weight = halves(a, weight)
    return HeadWeights(k_weight), HeadWeights(v_weight.mT)


def _dequantized(a: MlaDecodeArguments, target: Target) -> Generator[Step, Any, torch.Tensor]:
    """Performs the step that decodes kv_b_weight to q's dtype, [rows, L]."""
    words, q = _words(a)
    rows, rank = a.kv_b.shape
    out = yield Buffer((rows, rank), a.q.dtype)
    statics = dequantize_statics(q, 0, (rows, rank), (0, 0, *words.stride()), rows)
    given = {"scale": a.kv_b_scale, "zero": a.kv_b_zero, "factor": a.kv_b_factor}
    values = {"weight": words, **given, "out": out}
    yield launch(DEQUANTIZE, target, dequantize_grid(statics), values, statics)
    return out


def _words(a: MlaDecodeArguments) -> tuple[torch.Tensor, Quantization]:
    """Returns kv_b_weight in the dtype that kernels read, and the static data of the weight."""
    words = given(code_words([a.kv_b])[0])
    return words, quantization_of([a.kv_b], words.dtype)


def coded_heads(a: MlaDecodeArguments) -> tuple[CodedHeads, CodedHeads] | None:
    """Returns the codes of both weights, whose tiles a kernel decodes. Returns None if a word has
    rows of both weights, or if offsets do not fit into 32 bits."""
    words, q = _words(a)
    nope, _, v_dim = widths(a)
    heads, rank = a.q.shape[1], a.kv_b.shape[1]
    unit = q.per_word if q.packed_rows else 1
    if nope % unit or v_dim % unit or words.stride(1) * words.shape[1] > INT32_MAX:
        return None
    given = (words, a.kv_b_scale, a.kv_b_zero, a.kv_b_factor, q, nope + v_dim)
    return (
        CodedHeads((heads, nope, rank), *given, first_row=0, k_is_row=True),
        CodedHeads((heads, rank, v_dim), *given, first_row=nope, k_is_row=False),
    )


def _suits_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel can multiply the weights of heads by x [T, H, K]. If not, the library
    multiplies them."""
    return x.shape[0] <= MOST_TOKENS and x.stride(2) == 1


def scaled_heads(a: MlaDecodeArguments) -> tuple[HeadWeights, HeadWeights] | None:
    """Returns the codes of both weights if they are float8 codes, and a kernel can step over K such
    that all indices of a step share a scale. Otherwise returns None."""
    if a.weight_format != "fp8" or a.kv_b_factor is not None:
        return None
    nope, _, v_dim = widths(a)
    rows, rank = a.kv_b_weight.shape
    block, head_rows = (a.scale_block[0], a.scale_block[1]), nope + v_dim
    # If one block has all rows or columns, all indices share a scale, and any step is allowed.
    of_rows = BLOCK_K if block[0] >= rows else scaled_step(block[0], head_rows)
    of_columns = BLOCK_K if block[1] >= rank else scaled_step(block[1])
    if of_rows is None or of_columns is None:
        return None
    k_weight, v_weight = halves(a, a.kv_b_weight)
    shared = {"scale": a.kv_b_scale, "block": block, "head_rows": head_rows}
    return (
        HeadWeights(k_weight, **shared, k_is_row=True, step=of_rows),
        HeadWeights(v_weight.mT, **shared, first_row=nope, step=of_columns),
    )


def head_steps(
    x: torch.Tensor, weights: HeadWeights | CodedHeads, target: Target
) -> Generator[Step, Any, torch.Tensor]:
    """Multiplies x [T, H, K] by the weight [K, W] of each head. Returns [T, H, W]."""
    if isinstance(weights, CodedHeads):
        tensors = {
            "weight": weights.words,
            "scale": weights.scale,
            "zero": weights.zero,
            "factor": weights.factor,
        }
        _, k, width = weights.shape
        constants = coded_constants(weights.quantization, k, width, k_is_row=weights.k_is_row)
        constants |= {"HEAD_ROWS": weights.head_rows, "FIRST_ROW": weights.first_row}
        products = _launched(CODED_PRODUCTS, x, weights.shape, tensors, constants, target)
        return (yield from products)
    coded = weights.scale is not None
    if _suits_kernel(x) and (coded or x.dtype == weights.data.dtype):
        tensors = {"weights": weights.data, "scale": weights.scale}
        constants = _scale_constants(weights) if coded else {}
        constants |= {"BLOCK_W": BLOCK_WIDTH, "BLOCK_K": weights.step}
        products = _launched(HEAD_PRODUCTS, x, weights.data.shape, tensors, constants, target)
        return (yield from products)
    out = yield Buffer((*x.shape[:2], weights.data.shape[2]), x.dtype)
    yield Library(multiply_batch, (out.transpose(0, 1), x.transpose(0, 1), weights.data))
    return out


def _launched(
    kernel: Kernel,
    x: torch.Tensor,
    shape: Sequence[int],
    tensors: Mapping[str, torch.Tensor | None],
    constants: Mapping[str, Constant],
    target: Target,
) -> Generator[Step, Any, torch.Tensor]:
    """Launches a kernel that multiplies x [T, H, K] by weights of this shape [H, K, W]. Returns
    [T, H, W]. tensors, constants: the weights by the names of the kernel's parameters."""
    tokens, (heads, k, width) = x.shape[0], shape
    out = yield Buffer((*x.shape[:2], width), x.dtype)
    yield launch(
        kernel,
        target,
        head_grid(heads, width, tokens),
        {"x": x, "out": out, "num_tokens": tokens, **tensors},
        NUM_HEADS=heads,
        K=k,
        WIDTH=width,
        BLOCK_T=block_tokens(tokens),
        **constants,
    )
    return out


def _scale_constants(weights: HeadWeights) -> dict[str, Constant]:
    return {
        "HEAD_ROWS": weights.head_rows,
        "FIRST_ROW": weights.first_row,
        "K_IS_ROW": weights.k_is_row,
        "SCALE_BLOCK": weights.block,
    }


def absorbed_call(a: MlaPrefillArguments) -> MlaDecodeArguments | None:
    """Returns the call of `mla_decode` that is equivalent to a call of `mla_prefill`, except that
    its queries are not rotated yet. If the call has key_offsets, `with_lengths` adds the lengths of
    the sequences later. Returns None if there is no equivalent call, or if it would take longer."""
    coded = a.quantize_latent or a.latent_scale is not None
    if coded or a.attention_dtype not in (None, a.q.dtype) or sequences(a) == 0:
        return None
    keys = _keys_in_place(a)
    if keys is None:
        return None
    shared = {name: getattr(a, name) for name in BATCH_NAMES if name != "block_table"}
    table = a.lookup_table if a.keys == "table" else None
    call = MlaDecodeArguments(
        a.q,
        *keys,
        a.kv_b_weight,
        v_dim=a.v_dim,
        weight_format="fp8" if a.kv_b_weight.dtype == FP8 else "dense",
        kv_b_scale=a.kv_b_scale,
        scale_block=a.scale_block,
        block_table=table,
        **shared,
    )
    return call if decode_obstacle(call) is None and _is_faster(call, buffer_rows(a)) else None


def _keys_in_place(a: MlaPrefillArguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (latents, rope keys) [P, S, ..] if the keys are final and stored in a form that
    attention can read: equal runs of rows, a page per sequence, or pages of a table."""
    if a.keys in ("pages", "table"):
        return cache_views(a)
    finished = a.norm_weight is None and not rotates_keys(a)
    if a.keys != "given" or not finished or a.row_offsets is not None or a.key_offsets is not None:
        return None
    latent, rope = given(a.latent), given(a.k_rope)
    return latent.unflatten(0, (a.num_sequences, -1)), rope.unflatten(0, (a.num_sequences, -1))


def _is_faster(call: MlaDecodeArguments, num_keys: int) -> bool:
    """Whether absorbed attention is faster for a call. num_keys: the keys of all sequences
    together."""
    nope, rope, v_dim = widths(call)
    (tokens, heads, _), rank, batch = call.q.shape, call.latent.shape[2], sequences(call)
    return is_faster(
        queries=cdiv(tokens, batch),
        keys=num_keys // batch,
        heads=heads,
        nope=nope,
        rope=rope,
        v_dim=v_dim,
        rank=rank,
        sequences=batch,
    )


def with_lengths(
    call: MlaDecodeArguments, a: MlaPrefillArguments
) -> Generator[Step, Any, MlaDecodeArguments]:
    """Returns `call` with the number of keys of each sequence, computed from a.key_offsets. If
    a.key_offsets is None, returns `call` unchanged."""
    if a.key_offsets is None:
        return call
    lengths = yield Buffer((sequences(a),), torch.int32)
    given = (a.key_offsets,) if a.key_lengths is None else (a.key_offsets, a.key_lengths)
    yield Library(_counted, (lengths, *given))
    return replace(call, key_lengths=lengths)


def _counted(
    lengths: torch.Tensor, offsets: torch.Tensor, most: torch.Tensor | None = None
) -> None:
    counts = offsets.to(torch.int64).diff()
    lengths.copy_(counts if most is None else counts.minimum(most.to(torch.int64)))
