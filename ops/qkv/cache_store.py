"""`paged_kv_store`: writes K (rotated if a rope is given) and V to their cache slots.

The op is for cache writes that cannot be fused with a projection. The op accesses only the slots
that it writes.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.cache.address_checks import check_values
from tilewright.ops.cache.checks import HeadValues, check_caches, window_integers
from tilewright.ops.cache.writes import write_kv
from tilewright.ops.checks import FLOAT_DTYPES, check_operand
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv.arguments import KvStoreArguments
from tilewright.ops.qkv.cases import ATTENTION_CASES
from tilewright.ops.qkv.obstacles import STEPS, kernel_obstacle
from tilewright.ops.qkv.samples import AttentionCase, sample_cache
from tilewright.ops.sampling import Sampler

NAME = "paged_kv_store"


def validate(a: KvStoreArguments) -> None:
    check_operand(NAME, "k", a.k, "[T, Hkv, D]", (None, None, None), FLOAT_DTYPES)
    num_tokens, num_kv_heads, head_dim = a.k.shape
    if a.v is not None:
        check_operand(NAME, "v", a.v, "[T, Hkv, D]", a.k.shape, (a.k.dtype,), a.k.device)
    a.rope.check(NAME, num_tokens, head_dim, a.k.dtype, a.k.device)
    values = HeadValues(num_tokens, num_kv_heads, head_dim, a.k.dtype, a.k.device)
    check_caches(NAME, a, values, writes_v=a.v is not None)


def validate_values(a: KvStoreArguments) -> None:
    check_values(NAME, a, a.k.shape[0], writes_v=a.v is not None)


def reference(a: KvStoreArguments) -> None:
    """Computes the following in fp32 (float64 for float64 k) for each token t:

        k_cache[slot of t] = rope(k[t]) / k_cache_scale
        v_cache[slot of t] = v[t] / v_cache_scale

    A step whose arguments are None is omitted. With cache_scale_multiplies, values are multiplied
    by the scales. Each number is rounded once, when it is stored.
    """
    compute = torch.promote_types(a.k.dtype, torch.float32)
    k, v = a.k.to(compute), None if a.v is None else a.v.to(compute)
    write_kv(a, a.rope.apply(k), v)


def sample_inputs(
    case: AttentionCase, device: str | torch.device = "cpu", seed: int = 0
) -> KvStoreArguments:
    """Returns random arguments of a case. The caches have random numbers, so that a write to a
    wrong place is noticed."""
    sampler = Sampler(device, seed)
    shape = (case.num_tokens, case.num_kv_heads, case.head_dim)
    k, v = (sampler.normal(*shape, dtype=case.dtype) for _ in range(2))
    cache = sample_cache(case, sampler, KvStoreArguments)
    return KvStoreArguments(k=k, v=v if case.writes_v else None, **cache)


OP = register(
    FusedOp(
        name=NAME,
        arguments=KvStoreArguments,
        returns="()",
        validate=validate,
        validate_values=validate_values,
        reference=reference,
        lowerings=(emitted_kernel(f"{STEPS}:paged_kv_store_steps", kernel_obstacle),),
        cases=(*ATTENTION_CASES, AttentionCase("k_only", writes_v=False)),
        sample_inputs=sample_inputs,
    )
)


def paged_kv_store(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None = None,
    *,
    k_window: CacheWindow | None = None,
    v_window: CacheWindow | None = None,
    **options: Any,
) -> None:
    """Calls the op: writes k and v [T, Hkv, D] to their slots.

    Without a window, the cache is [num_pages, page_size, num_kv_heads, head_dim]. KvStoreArguments
    explains the other options. Raises ArgumentError before anything is written.
    """
    k_ints = window_integers(NAME, "k_window", k_window, k_cache)
    v_ints = [] if v is None else window_integers(NAME, "v_window", v_window, v_cache)
    OP.torch_op(k, v, k_cache, v_cache, slot_mapping, k_ints, v_ints, **options)
