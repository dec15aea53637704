"""Lists the audit cases of MLA's attention core, which is compiled with every supported release of
Triton.

The cases cover the sizes of published models, 16-bit and 8-bit floats, dense and ragged sequences,
each mask, and the kernels before and after the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.mla.attention.cudnn import join_launch
from tilewright.ops.mla.attention.lowering import attention_steps, merge_steps, query_steps
from tilewright.ops.mla.attention.operands import AttentionCall
from tilewright.ops.reference.rope import RopeTables
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.cases import (
    SOFTMAX_REASON,
    SPECIALISED_STACK_BYTES,
    AuditCase,
    audited,
    meta,
)

FP8 = torch.float8_e4m3fn


def _integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _flags(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.bool)


def attention_call(
    heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int, int] = (128, 64, 128),
    ragged: bool = True,
    rows: int = 4096,
    **options: Any,
) -> AttentionCall:
    """Returns a call with `rows` queries and keys. Keys and values have the layout that the
    up-projection writes."""
    nope, rope, v_dim = dims
    q = meta(1, rows, heads, nope + rope, dtype=dtype)
    kv = meta(1, rows, heads, nope + v_dim, dtype=dtype)
    k, v, k_rope = kv[..., :nope], kv[..., nope:], meta(1, rows, rope, dtype=dtype)
    if dtype == FP8:
        k = meta(1, rows, heads, nope, dtype=dtype)
        v = meta(1, heads, v_dim, rows, dtype=dtype).permute(0, 3, 1, 2)
    parts: dict[str, Any] = {
        "q": q[..., :nope],
        "q_rope": q[..., nope:],
        "k": k,
        "v": v,
        "k_rope": k_rope,
    }
    if ragged:
        parts = {name: part[0] for name, part in parts.items()}
        options = {"query_offsets": _integers(9), "key_offsets": _integers(9), **options}
        options.setdefault("query_starts", _integers(8))
    return AttentionCall(**{"scale": 0.1, **parts, **options})


TABLE = meta(163840, 64, dtype=torch.float32)
ROPE = RopeTables(TABLE[:, ::2], TABLE[:, 1::2], "interleaved", rope_by_position=True)
ROTATED: dict[str, Any] = {"q": meta(4096, 128, 192), "q_rope": None, "tables": ROPE}
CALLS: dict[str, AttentionCall] = {
    "128 heads": attention_call(128),
    "16 heads, dense": attention_call(16, ragged=False),
    "128 heads, e4m3": attention_call(128, dtype=FP8),
    "16 heads, e4m3, partial": attention_call(16, dtype=FP8, return_lse=True),
    "128 heads, no mask, partial": attention_call(128, mask="none", return_lse=True),
    "128 heads, window": attention_call(128, mask="sliding_window", window=4096),
    "128 heads, e4m3, chunks": attention_call(128, dtype=FP8, mask="chunked", window=8192),
    "16 heads, positions": attention_call(16, ragged=False, query_positions=_integers(4096)),
    "16 heads, mask tensor": attention_call(
        16, ragged=False, mask="none", attn_mask=meta(1, 1, 4096, 4096)
    ),
    "40 heads, narrow, mask of booleans": attention_call(
        40, ragged=False, dims=(64, 32, 64), mask="none", attn_mask=_flags(1, 1, 4096, 4096)
    ),
    "20 heads, wide, mask of booleans": attention_call(
        20, ragged=False, dims=(192, 64, 256), mask="none", attn_mask=_flags(1, 1, 4096, 4096)
    ),
    "16 heads, one query, mask of booleans": attention_call(
        16,
        ragged=False,
        mask="none",
        attn_mask=_flags(1, 1, 1, 4096),
        q=meta(1, 1, 16, 128),
        q_rope=meta(1, 1, 16, 64),
    ),
    "16 heads, causal and mask tensor": attention_call(
        16, ragged=False, attn_mask=meta(1, 1, 4096, 4096)
    ),
    "64 heads, wide": attention_call(64, dims=(192, 64, 256)),
    "128 heads, rotated": attention_call(128, **ROTATED),
}


@audited("mla")
def mla_attention_cases(target: Target) -> list[AuditCase]:
    """Returns the cases of the core for each call in CALLS, and of the kernels before and after the
    core."""
    return [*_cores(target), *_others(target)]


def _cores(target: Target) -> Iterator[AuditCase]:
    for name, call in CALLS.items():
        for spec in drive(attention_steps(call, target), Planner(target)).specs:
            if spec.kernel == "mask_blocks":
                continue  # attention's own audit has this case
            claims = _core_claims(spec) if spec.kernel == "mla_attention" else Expectations()
            yield AuditCase(f"mla attention, {name}", spec, claims)


def _core_claims(spec: KernelSpec) -> Expectations:
    specialised = bool(spec.constant("WARP_SPECIALIZE"))
    return Expectations(
        mma=dict(spec.signature)["k_ptr"].removeprefix("*"),
        tma_loads=bool(spec.constant("TMA")),
        warp_specialized=specialised,
        stack_bytes=SPECIALISED_STACK_BYTES if specialised else 0,
        fresh_sums_reason=SOFTMAX_REASON,
    )


def _others(target: Target) -> Iterator[AuditCase]:
    """Yields the cases of the kernels before and after the core, for calls of other sizes."""
    dense = CALLS["16 heads, dense"]
    keys = meta(*dense.k.shape[:-1], dense.nope + dense.rope)
    yield AuditCase("mla join", join_launch(dense, keys, target).spec, Expectations())
    part, lse = meta(4096, 16, 128, dtype=torch.float32), meta(4096, 16, dtype=torch.float32)
    merge = merge_steps([part] * 4, [lse] * 4, torch.bfloat16, target)
    yield from _cases("mla merge", merge, target)
    joined = meta(4096, 128, 64 + 128 + 128)
    runs = ROTATED | {"q": meta(1, 4096, 128, 192)}
    for name, call, rows in (
        ("rotated", attention_call(128, **ROTATED), None),
        ("cast", attention_call(128, dtype=FP8, **ROTATED), None),
        ("with joined keys", attention_call(128, ragged=False, **runs), joined),
    ):
        steps = query_steps(call, target, whole=rows is not None, joined=rows)
        yield from _cases(f"mla query, {name}", steps, target)


def _cases(name: str, steps: Any, target: Target) -> Iterator[AuditCase]:
    for spec in drive(steps, Planner(target), keep=True).specs:
        yield AuditCase(name, spec, Expectations())
