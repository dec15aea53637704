"""Calls of the MLA attention core as problems: what is static, and the values of a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mla.attention_specs import (
    MASKS,
    STRIDES,
    AttentionProblem,
    AttentionSizes,
)
from tilewright.codegen.mla.query_specs import NO_ROTATION, Rotation
from tilewright.ops.checks import ArgumentError, check_choice
from tilewright.ops.runtime.dtypes import TRITON_TYPES

OP = "mla attention"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float16, *FP8)
# TMA: strides and base addresses in whole 16 bytes.
TMA_BYTES = 16


@dataclass(frozen=True)
class QueryRope:
    """A rotation of q's last columns. style, cos and sin as in ops/reference/rope.py; cos and sin
    may have any strides. by_position: a token's row of the tables is its position, not its
    number."""

    cos: torch.Tensor
    sin: torch.Tensor
    style: str
    by_position: bool = False

    def of(self, columns: int) -> Rotation:
        """What is static about it, for so many columns of q."""
        return Rotation(
            style=self.style,
            cos_type=TRITON_TYPES[self.cos.dtype],
            sin_type=None if paired(self.cos, self.sin, columns) else TRITON_TYPES[self.sin.dtype],
            full_width=self.cos.shape[-1] == columns,
            cos_strides=_row_and_column(self.cos),
            sin_strides=_row_and_column(self.sin),
            by_position=self.by_position,
        )

    @property
    def rows(self) -> int:
        """Rows of the tables, at least 1."""
        return max(self.cos.shape[0], 1)


def paired(cos: torch.Tensor, sin: torch.Tensor, columns: int) -> bool:
    """Whether each sine of rotated `columns` follows its cosine, as real and imaginary parts do."""
    alike = cos.stride() == sin.stride() and cos.dtype == sin.dtype
    after = address(sin) - address(cos) == cos.element_size()
    return alike and after and cos.stride(-1) == 2 and 2 * cos.shape[-1] == columns


def _row_and_column(table: torch.Tensor) -> tuple[int, int]:
    row, column = table.stride()
    return row, column


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of `attend`, with q's rope part apart and of k's dtype. turn: how q_rope is to be
    rotated first, if it is not done."""

    q: torch.Tensor
    q_rope: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    k_rope: torch.Tensor | None
    scale: float
    query_offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    mask: str = "causal"
    window: int = 0
    attn_mask: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    return_lse: bool = False
    max_query_tokens: int | None = None
    turn: QueryRope | None = None

    @property
    def ragged(self) -> bool:
        return self.query_offsets is not None

    @property
    def num_sequences(self) -> int:
        if self.query_offsets is not None:
            return self.query_offsets.shape[0] - 1
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def nope(self) -> int:
        return self.k.shape[-1]

    @property
    def rope(self) -> int:
        return 0 if self.k_rope is None else self.k_rope.shape[-1]

    @property
    def v_by_key(self) -> bool:
        """Whether a value dim's keys are contiguous, rather than a key's dims."""
        return self.v.stride(-1) != 1 and self.v.stride(-3) == 1

    @property
    def sizes(self) -> AttentionSizes:
        queries, keys = self.q.shape[-3], self.k.shape[-3]
        longest = queries if self.max_query_tokens is None else self.max_query_tokens
        return AttentionSizes(self.num_sequences, queries, keys, min(longest, queries))


def with_query_parts(
    plain: AttentionCall, own: torch.Tensor, turned: torch.Tensor
) -> AttentionCall:
    """The call whose q is `own`, with `turned` beside it where keys have two parts."""
    return replace(plain, q=own, q_rope=None if plain.k_rope is None else turned)


def query_views(plain: AttentionCall, rope: QueryRope | torch.Tensor | None) -> AttentionCall:
    """The call, whose q has all columns, with both parts of its queries as they are given."""
    turned = rope if isinstance(rope, torch.Tensor) else plain.q[..., plain.nope :]
    return with_query_parts(plain, plain.q[..., : plain.nope], turned)


def check_call(a: AttentionCall) -> None:
    """Raises ArgumentError for what no kernel takes. Shapes come from the calling op, checked."""
    check_choice(OP, "mask", a.mask, MASKS)
    if a.mask in ("sliding_window", "chunked") and a.window < 1:
        raise ArgumentError(OP, "window", f"at least 1, since mask is {a.mask!r}", a.window)
    if not (a.scale > 0 and math.isfinite(a.scale)):
        raise ArgumentError(OP, "scale", "a positive number", a.scale)
    if a.k.dtype not in DTYPES:
        raise ArgumentError(OP, "k", "bfloat16, float16 or an 8-bit float", a.k.dtype)
    for name in ("q", "v", "q_rope"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.dtype != a.k.dtype:
            raise ArgumentError(OP, name, f"dtype {a.k.dtype}, as k", tensor.dtype)
    if (a.query_offsets is None) != (a.key_offsets is None):
        raise ArgumentError(OP, "key_offsets", "given exactly where query_offsets is", None)
    if a.attn_mask is not None and a.ragged:
        raise ArgumentError(OP, "attn_mask", "None, since sequences are ragged", "a tensor")
    for name in ("q", "q_rope", "k", "k_rope"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.numel() and tensor.stride(-1) != 1:
            raise ArgumentError(OP, name, "a contiguous last dimension", list(tensor.stride()))
    if a.v.numel() and a.v.stride(-1) != 1 and a.v.stride(-3) != 1:
        raise ArgumentError(OP, "v", "contiguous dims, or contiguous keys", list(a.v.stride()))


def _triple(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """(sequence, token, head) strides; without a sequence dim its stride is 0."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.stride()
    return (0, strides[0], strides[1]) if len(strides) == 3 else tuple(strides[:3])  # type: ignore[return-value]


def _rope_strides(a: AttentionCall) -> tuple[int, int, int]:
    """(sequence, key, head) strides of rope keys: shared by heads unless they have a dim for it."""
    if a.k_rope is None:
        return 0, 0, 0
    strides = a.k_rope.stride()
    if a.block_table is not None:
        return 0, strides[1], 0
    own = 2 if a.ragged else 3
    if len(strides) == own:
        return (0, strides[0], 0) if a.ragged else (strides[0], strides[1], 0)
    return _triple(a.k_rope)


def strides_of(a: AttentionCall) -> dict[str, int]:
    """The strides of a launch by the kernel's parameter names, and K_STRIDE and ROPE_STRIDE."""
    q, q_rope, k = _triple(a.q), _triple(a.q_rope), _triple(a.k)
    v_sequence = 0 if a.ragged else a.v.stride(0)
    rope = _rope_strides(a)
    positions, mask = a.query_positions, a.attn_mask
    masks = [0, 0, 0, 0]
    if mask is not None:
        masks = [s if n > 1 else 0 for n, s in zip(mask.shape, mask.stride(), strict=True)]
    by_sequence = positions is not None and positions.dim() == 2
    found = {
        "q_sequence_stride": q[0],
        "q_head_stride": q[2],
        "q_token_stride": q[1],
        "q_rope_sequence_stride": q_rope[0],
        "q_rope_head_stride": q_rope[2],
        "q_rope_token_stride": q_rope[1],
        "k_sequence_stride": k[0],
        "k_head_stride": k[2],
        "v_sequence_stride": v_sequence,
        "v_head_stride": a.v.stride(-2),
        "v_stride": a.v.stride(-1) if a.v_by_key else a.v.stride(-3),
        "rope_sequence_stride": rope[0],
        "rope_head_stride": rope[2],
        "positions_sequence_stride": positions.stride(0) if by_sequence else 0,  # type: ignore[union-attr]
        "positions_stride": 0 if positions is None else positions.stride(-1),
        "table_stride": 0 if a.block_table is None else a.block_table.stride(0),
        "mask_sequence_stride": masks[0],
        "mask_head_stride": masks[1],
        "mask_row_stride": masks[2],
        "mask_column_stride": masks[3],
    }
    return found | {"K_STRIDE": k[1], "ROPE_STRIDE": rope[1]}


def tensors_of(a: AttentionCall) -> dict[str, torch.Tensor | None]:
    """The tensors of a launch by the kernel's parameter names; out and lse are not among them."""
    return {
        "q_ptr": a.q,
        "q_rope_ptr": a.q_rope,
        "k_ptr": a.k,
        "v_ptr": a.v,
        "rope_ptr": a.k_rope,
        "query_offsets_ptr": a.query_offsets,
        "key_offsets_ptr": a.key_offsets,
        "query_starts_ptr": a.query_starts,
        "key_starts_ptr": a.key_starts,
        "key_lengths_ptr": a.key_lengths,
        "positions_ptr": a.query_positions,
        "block_table_ptr": a.block_table,
        "mask_ptr": _mask_bytes(a.attn_mask),
        "q_scale_ptr": a.q_scale,
        "k_scale_ptr": a.k_scale,
        "v_scale_ptr": a.v_scale,
        "cos_ptr": None if a.turn is None else a.turn.cos,
        "sin_ptr": None if a.turn is None else a.turn.sin,
    }


def _mask_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def attention_problem(a: AttentionCall) -> AttentionProblem:
    """What is static about a call."""
    strides, tensors = strides_of(a), tensors_of(a)
    aligned = [name for name in STRIDES if strides[name] % 16 == 0]
    aligned += [n for n, t in tensors.items() if t is not None and address(t) % TMA_BYTES == 0]
    indices = ("offsets", "starts", "lengths", "positions", "table")
    rope_dtype = a.k.dtype if a.k_rope is None else a.k_rope.dtype
    mask_kind, mask_dtype = "none", "u8"
    if a.attn_mask is not None:
        mask_kind = "bool" if a.attn_mask.dtype == torch.bool else "additive"
        if mask_kind == "additive":
            mask_dtype = TRITON_TYPES[a.attn_mask.dtype]
    return AttentionProblem(
        dtype=TRITON_TYPES[a.k.dtype],
        out_dtype=TRITON_TYPES[a.out_dtype],
        num_heads=a.num_heads,
        nope=a.nope,
        rope=a.rope,
        v_dim=a.v.shape[-1],
        k_stride=strides["K_STRIDE"],
        rope_stride=strides["ROPE_STRIDE"],
        rope_dtype=TRITON_TYPES[rope_dtype],
        v_by_key=a.v_by_key,
        page_size=0 if a.block_table is None else a.k_rope.shape[1],  # type: ignore[union-attr]
        page_stride=0 if a.block_table is None else a.k_rope.stride(0),  # type: ignore[union-attr]
        ragged=a.ragged,
        sequences=next_power_of_2(max(a.num_sequences, 1)) if a.ragged else 1,
        mask=a.mask,
        window=a.window if a.mask in ("sliding_window", "chunked") else 0,
        mask_kind=mask_kind,
        mask_dtype=mask_dtype,
        lse=a.return_lse,
        indices=tuple(
            (name, TRITON_TYPES[tensor.dtype])
            for name, tensor in tensors.items()
            if tensor is not None and any(word in name for word in indices)
        ),
        scales=tuple(n for n, t in tensors.items() if n.endswith("scale_ptr") and t is not None),
        aligned=(*aligned, "out_ptr"),
        tma=_descriptors_reach(a, strides),
        rope_tma=_rope_descriptor_reaches(a, strides),
        joint=_joint(a, strides),
        rotation=NO_ROTATION if a.turn is None else a.turn.of(a.rope),
    )


def _joint(a: AttentionCall, strides: dict[str, int]) -> bool:
    """Whether a key's values follow it, so that one descriptor reads both."""
    dims = (a.nope, a.v.shape[-1])
    whole = all(next_power_of_2(dim) == dim for dim in dims) and dims[0] == dims[1]
    alike = (a.k.stride() == a.v.stride()) and not a.v_by_key
    after = address(a.v) - address(a.k) == a.nope * a.k.element_size()
    same = a.k.device.type == "meta" or (
        a.k.untyped_storage().data_ptr() == a.v.untyped_storage().data_ptr()
    )
    return whole and alike and after and same


def address(tensor: torch.Tensor) -> int:
    """A tensor's address modulo what allocations keep; by its offset where it has no memory."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def _descriptors_reach(a: AttentionCall, strides: dict[str, int]) -> bool:
    operands: list[tuple[Any, tuple[str, ...]]] = [
        (a.q, ("q_sequence_stride", "q_head_stride", "q_token_stride")),
        (a.k, ("k_sequence_stride", "k_head_stride", "K_STRIDE")),
        (a.v, ("v_sequence_stride", "v_head_stride", "v_stride")),
    ]
    if a.q_rope is not None:
        names = ("q_rope_sequence_stride", "q_rope_head_stride", "q_rope_token_stride")
        operands.append((a.q_rope, names))
    return all(_reachable(tensor, [strides[name] for name in names]) for tensor, names in operands)


def _rope_descriptor_reaches(a: AttentionCall, strides: dict[str, int]) -> bool:
    if a.k_rope is None or a.block_table is not None or a.k_rope.dtype != a.k.dtype:
        return False
    names = ("rope_sequence_stride", "rope_head_stride", "ROPE_STRIDE")
    return _reachable(a.k_rope, [strides[name] for name in names])


def _reachable(tensor: torch.Tensor, steps: list[int]) -> bool:
    size = tensor.element_size()
    bytes_of = (address(tensor), *(step * size for step in steps))
    return all(count % TMA_BYTES == 0 for count in bytes_of)
