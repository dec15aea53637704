"""Why no emitted kernel takes a call of an MLA op; metadata only."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.mla.checks import widths

VALUE_DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 2048


def store_obstacle(a: Any) -> str | None:
    """Why no kernel takes a `mla_latent_store` call; None where one does. Metadata only."""
    if a.latent.dtype not in (*VALUE_DTYPES, torch.float32):
        return f"no kernel for {a.latent.dtype}"
    return _width_obstacle(a.latent.shape[1], a.k_rope.shape[1])


def prefill_obstacle(a: Any) -> str | None:
    """Why no kernels take a `mla_prefill` call; None where they do. Metadata only."""
    if a.q.dtype not in VALUE_DTYPES:
        return f"no kernel for {a.q.dtype}"
    if not a.scale > 0:  # the largest logit is that of the largest product
        return f"no kernel for a scale of {a.scale}"
    rank = a.kv_b_weight.shape[1]
    obstacle = _width_obstacle(rank, widths(a)[1])
    if obstacle is None and _coded(a):
        obstacle = _coded_obstacle(a)
    if obstacle is None and a.kv_b_weight.stride(0) * a.kv_b_weight.element_size() % 16:
        obstacle = (
            f"kv_b_weight: rows {a.kv_b_weight.stride(0)} elements apart are out of TMA's reach"
        )
    return obstacle


def _coded(a: Any) -> bool:
    """Whether the up-projection multiplies codes."""
    return a.quantize_latent or a.latent_scale is not None


def _coded_obstacle(a: Any) -> str | None:
    columns, rows = a.scale_block[1], a.kv_b_weight.shape[0]
    if columns not in (32, 64, 128):
        return f"no kernel for scales of {columns} columns"
    if rows * a.q.element_size() % 16:
        return f"keys and values of {rows} columns are out of TMA's reach"
    if a.latent_scale is not None and a.latent.stride(0) % 16:
        return f"latent: rows {a.latent.stride(0)} bytes apart are out of TMA's reach"
    return None


def branch_obstacle(a: Any) -> str | None:
    """Why no kernels take a `mla_prefill_branch_fp8` call; None where they do. Metadata only."""
    if a.q.dtype not in VALUE_DTYPES:
        return f"no kernel for {a.q.dtype}"
    if not a.scale > 0:
        return f"no kernel for a scale of {a.scale}"
    rank = a.kv_b_proj.shape[1]
    obstacle = _width_obstacle(rank, a.latents.shape[1] - rank)
    if obstacle is None and a.kv_b_proj.shape[0] * a.q.element_size() % 16:
        obstacle = f"keys and values of {a.kv_b_proj.shape[0]} columns are out of TMA's reach"
    if obstacle is None and a.kv_b_proj.stride(0) % 16:
        obstacle = f"kv_b_proj: rows {a.kv_b_proj.stride(0)} bytes apart are out of TMA's reach"
    return obstacle


def _width_obstacle(rank: int, rope_dim: int) -> str | None:
    if rope_dim % 2:
        return f"no kernel for {rope_dim} rope columns"
    return None if rank <= MAX_RANK else f"no kernel for latents of rank {rank}"
