"""The record AttentionCall, which describes a call of the attention of MLA ops, and its conversion
to the static problem and the run-time values of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import LOG2E, next_power_of_2
from tilewright.codegen.attention.blocks import LIST_STRIDES
from tilewright.codegen.attention.problem import AttentionSizes
from tilewright.codegen.mla.attention_kernels import AttentionProblem
from tilewright.codegen.mla.query_kernels import NO_ROTATION, QueryProblem, Rotation
from tilewright.codegen.spec import Constant
from tilewright.ops.attention.masks import check_mask, known_strides
from tilewright.ops.checks import ArgumentError, check_number, given
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.reference.rope import RopeTables
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import follows, mask_bytes, tma_reaches

OP = "mla attention"
DTYPES = (torch.bfloat16, torch.float16, *FP8_DTYPES)


def rotation_of(
    tables: RopeTables | None, columns: int
) -> tuple[Rotation, dict[str, torch.Tensor | None]]:
    """Returns the static data of a rotation of `columns`, and the tables of the rotation by the
    names of the kernel's parameters. `sin` is None if cosines and sines alternate in one table."""
    if tables is None:
        return NO_ROTATION, {"cos": None, "sin": None}
    cos = given(tables.cos)
    sin = None if tables.paired and 2 * cos.shape[-1] == columns else given(tables.sin)
    rotation = Rotation(
        rope_style=tables.rope_style,
        full_width=cos.shape[-1] == columns,
        by_position=tables.rope_by_position,
        cos_strides=cos.stride(),
        sin_strides=(cos if sin is None else sin).stride(),
    )
    return rotation, {"cos": cos, "sin": sin}


@dataclass(frozen=True)
class AttentionCall:
    """A call that computes softmax(scale * [q . k + q_rope . k_rope], masked) @ v.

    Attributes:
        q, q_rope: The unrotated part [T, H, N] and the rotated part [T, H, R] of the queries. If
            q_rope is None, q is [T, H, N + R] and has both parts. If q is wider than 8 bits and k
            is not, q is divided by q_scale and cast to k's dtype, saturating.
        k, v, k_rope: The keys [K, H, N], the values [K, H, V] and the rotated part [K, R] of the
            keys, which all heads share. The dtypes are bf16, fp16 or e4m3.
        scale: A positive number, by which the logits are multiplied.
        query_offsets, key_offsets: The first row of each sequence, and the number of rows at the
            end, int [B + 1]. They are None for dense sequences. The other tensors then have a batch
            dimension in front.
        query_starts: The position of the first query of each sequence, int [B]. If it is None, the
            positions are 0.
        key_starts: The position of the first key of each sequence, int [B]. If it is None, the
            positions are 0.
        key_lengths: The number of keys of each sequence that queries may attend to, int [B].
            Queries do not attend to keys at later positions.
        query_positions: The position of each query, int [T], [S] or [B, S], instead of
            query_starts.
        mask, window: "none", "causal", "sliding_window" (causal, and only the last `window` keys)
            or "chunked" (causal, within chunks of `window`).
        attn_mask: A mask [B or 1, H or 1, S or 1, K] for dense sequences, where K is at least the
            number of keys of a sequence. A bool mask has True for a visible key. A mask of numbers
            is added to the logits.
        mask_blocks: The list of blocks of attn_mask, as the op `mask_blocks` returns it. If it is
            None, the call computes the list.
        q_scale, k_scale, v_scale: fp32 scalars on the device, by which 8-bit values are multiplied.
        out_dtype: The dtype of the result.
        return_lse: Whether the call also returns the natural log-sum-exp of the scaled logits, fp32
            [T, H].
        tables: The tables by which q's last columns are rotated before attention; None for no
            rotation.

    The tensors may have any strides, but their last dimension is contiguous. v may be contiguous
    along its keys instead, which is fastest for 8 bits. If a query attends to no key, its result is
    zeros, and its log-sum-exp is -inf. The results of tokens outside the offsets are not written.
    Nothing is read back from the device.
    """

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
    mask: str = "causal"
    window: int = 0
    attn_mask: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    return_lse: bool = False
    tables: RopeTables | None = None

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
        """Whether v is contiguous along its keys, rather than along its last dimension."""
        return self.v.stride(-1) != 1 and self.v.stride(-3) == 1

    @property
    def sizes(self) -> AttentionSizes:
        return AttentionSizes(self.num_sequences, self.q.shape[-3], self.k.shape[-3])

    @property
    def table_rows(self) -> int:
        """The number of rows of the rotation's tables; 1 if there are none."""
        return 1 if self.tables is None else max(given(self.tables.cos).shape[0], 1)

    def with_queries(self, own: torch.Tensor, turned: torch.Tensor) -> AttentionCall:
        """Returns the call with these queries. own: the unrotated part of the queries. turned: the
        rotated part of the queries, which is ignored if the keys have no rotated part."""
        return replace(self, q=own, q_rope=None if self.k_rope is None else turned)

    def in_parts(self) -> AttentionCall:
        """Returns the call with q divided into its two parts, which are views of q."""
        turned = self.q[..., self.nope :] if self.q_rope is None else self.q_rope
        return self.with_queries(self.q[..., : self.nope], turned)


def check_call(a: AttentionCall) -> None:
    """Raises ArgumentError for a call that no kernel can compute. The calling op has checked the
    shapes."""
    check_mask(OP, a)
    check_number(OP, "scale", a.scale, above=True)
    if a.k.dtype not in DTYPES:
        raise ArgumentError(OP, "k", "bfloat16, float16 or an 8-bit float", a.k.dtype)
    for name in ("q", "v", "q_rope"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.dtype != a.k.dtype:
            raise ArgumentError(OP, name, f"dtype {a.k.dtype}, as k", tensor.dtype)
    if (a.query_offsets is None) != (a.key_offsets is None):
        expected = "a tensor exactly if query_offsets is a tensor"
        raise ArgumentError(OP, "key_offsets", expected, None)
    if a.attn_mask is not None and a.ragged:
        raise ArgumentError(OP, "attn_mask", "None, since sequences are ragged", "a tensor")
    for name in ("q", "q_rope", "k", "k_rope"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.numel() and tensor.stride(-1) != 1:
            raise ArgumentError(OP, name, "a contiguous last dimension", list(tensor.stride()))
    if a.v.numel() and a.v.stride(-1) != 1 and a.v.stride(-3) != 1:
        expected = "the last dimension or the dimension of the keys contiguous"
        raise ArgumentError(OP, "v", expected, list(a.v.stride()))


def launch_values(a: AttentionCall) -> dict[str, Any]:
    """Returns the tensors and numbers of a call by the names of the kernel's parameters, except the
    results, the tables of the rotation and the numbers that depend on the tile sizes."""
    sizes = a.sizes
    return {
        **vars(a),  # kernel parameters with the same names as fields
        "rope": a.k_rope,
        "positions": a.query_positions,
        "mask": None if a.attn_mask is None else mask_bytes(a.attn_mask),
        "v_stride": a.v.stride(-1 if a.v_by_key else -3),
        "num_sequences": sizes.num_sequences,
        "num_queries": sizes.num_queries,
        "num_keys": sizes.num_keys,
        "table_rows": a.table_rows,
        "factor": a.scale * LOG2E,
    }


def constant_strides(a: AttentionCall) -> dict[str, Constant]:
    """Returns the strides that are known when the kernel is compiled."""
    lists = {} if a.mask_blocks is not None else dict.fromkeys(LIST_STRIDES, 0)
    return lists | known_strides(a.attn_mask)


def attention_problem(a: AttentionCall) -> AttentionProblem:
    """Returns the static problem of a call."""
    return AttentionProblem(
        num_heads=a.num_heads,
        nope=a.nope,
        rope=a.rope,
        v_dim=a.v.shape[-1],
        dtype=TRITON_TYPES[a.k.dtype],
        out=TRITON_TYPES[a.out_dtype],
        has_lse=a.return_lse,
        ragged=a.ragged,
        positioned=a.query_positions is not None,
        attn_mask="" if a.attn_mask is None else TRITON_TYPES[mask_bytes(a.attn_mask).dtype],
        v_by_key=a.v_by_key,
        sequences=next_power_of_2(max(a.num_sequences, 1)) if a.ragged else 1,
        mask=a.mask,
        window=a.window,
        tma=all(_reached(part) for part in (a.q, a.k, a.v, a.q_rope) if part is not None),
        rope_tma=a.k_rope is not None and a.k_rope.dtype == a.k.dtype and _reached(a.k_rope),
        joint=_joint(a),
    )


def _joint(a: AttentionCall) -> bool:
    """Whether the values of a key follow the key in memory, so that one descriptor reads both."""
    dims = (a.nope, a.v.shape[-1])
    whole = all(next_power_of_2(dim) == dim for dim in dims) and dims[0] == dims[1]
    return whole and not a.v_by_key and follows(a.v, a.k)


def _reached(part: torch.Tensor) -> bool:
    """Whether a descriptor can read a tensor with one contiguous dimension."""
    strides = list(part.stride())
    strides.remove(1)
    return tma_reaches(part, *strides)


def query_call(
    a: AttentionCall, whole: bool, joined: torch.Tensor | None
) -> tuple[QueryProblem, Rotation, dict[str, Any]]:
    """Returns the problem, the rotation and the values of a launch of `mla_query`. The values lack
    the output.

    whole: whether all columns of the queries are written, and not only the rotated columns. joined:
    the tensor of keys whose rope columns are written; None if there is none.
    """
    q, tables = a.q, a.tables
    if a.q_rope is not None:
        q = torch.cat((q[..., : a.nope], a.q_rope), dim=-1)
    tokens = q.shape[:-2].numel()
    run = tokens if a.ragged else q.shape[-3]
    if a.query_positions is not None and a.query_positions.dim() == 2:
        # If each token has its own position, the tokens of all sequences count as one sequence.
        q, run = q.reshape(1, tokens, *q.shape[-2:]), tokens
    offsets = starts = positions = None
    if tables is not None and tables.rope_by_position:
        offsets, starts, positions = a.query_offsets, a.query_starts, a.query_positions
        positions = None if positions is None else positions.reshape(-1)
    casts = q.dtype != a.k.dtype
    rotation, rotated = rotation_of(tables, a.rope)
    values: dict[str, Any] = {
        "q": q,
        **rotated,
        "row_offsets": offsets,
        "starts": starts,
        "positions": positions,
        "scale": a.q_scale if casts else None,
        "k_rope": None if joined is None else a.k_rope,
        "joined": joined,
        "num_rows": tokens * q.shape[-2],
        "token_run": max(run, 1),
        "rope_rows": a.table_rows,
        "num_sequences": a.num_sequences,
    }
    steps = max(a.num_sequences, 1).bit_length()
    problem = QueryProblem(a.num_heads, a.nope, a.rope, steps, whole or casts, casts)
    return problem, rotation, values
