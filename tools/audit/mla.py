"""Kernels around MLA's attention that every compiler release is tried on: published dims, values
and codes, each kind of store, gather and up-projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.mla import key_specs as kernels
from tilewright.codegen.mla.key_specs import UpProblem
from tilewright.codegen.mla.plan import up_config
from tilewright.codegen.targets import Target
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.key_lowering import latent_kernel, latent_launches
from tilewright.ops.mla.operands import Chunk, key_buffers, numbers_problem, up_problem
from tilewright.ops.mla.prefill import MlaPrefillArguments
from tilewright.tools.audit.cases import SPECIALISED_STACK_BYTES, AuditCase

ROW_COUNTS = (64, 4096)
SCALED_SUMS_REASON = "each block of columns has scales of its own"
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Latents:
    """The MLA dims of a published model, or a GPU's share of its heads."""

    name: str
    num_heads: int
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    rank: int = 512
    granularity: int = 128

    def arguments(self, rows: int, *, coded: bool, narrow: bool = False) -> MlaPrefillArguments:
        """A paged prefill of meta tensors: one sequence of `rows` tokens, nothing cached."""
        heads, width, rank = self.num_heads, self.nope + self.rope, self.rank
        pool = _meta(256, 1, 4, 128, 1, rank + self.rope)
        entries = pool[:, 0, 1]
        weight_rows, block = heads * (self.nope + self.v_dim), self.granularity
        latent = _meta(rows, rank + self.rope)
        scale = _meta(-(-weight_rows // block), -(-rank // block), dtype=torch.float32)
        values: dict[str, Any] = {
            "kv_b_weight": _meta(weight_rows, rank, dtype=FP8 if coded else torch.bfloat16),
        }
        if coded:
            values |= {"kv_b_scale": scale, "scale_block": (block, block), "quantize_latent": True}
            values["latent_scale_cap"] = 1200.0
        table = _meta(163840, self.rope, dtype=torch.float32)
        return MlaPrefillArguments(
            q=_meta(rows, heads, width),
            latent=latent[:, :rank],
            k_rope=latent[:, rank:],
            latent_cache=pool,
            latent_window=CacheWindow.of(entries[..., :rank], pool).to_ints(),
            rope_window=CacheWindow.of(entries[..., rank:], pool).to_ints(),
            v_dim=self.v_dim,
            scale=width**-0.5,
            row_offsets=_meta(2, dtype=torch.int32),
            keys="table",
            key_offsets=_meta(2, dtype=torch.int32),
            num_keys=rows,
            slots="ragged",
            lookup_table=_meta(1, 256, dtype=torch.int32),
            cache_lengths=_meta(1, dtype=torch.int32),
            norm_weight=_meta(rank),
            cos=table[:, ::2],
            sin=table[:, 1::2],
            rope_style="interleaved",
            rope_by_position=True,
            attention_dtype=FP8 if narrow else None,
            **values,
        )


MODELS = (
    Latents("deepseek-v3", 128),
    Latents("deepseek-v2-lite", 16),
    Latents("glm-5", 8, nope=192, v_dim=256, granularity=64),
)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mla_cases(target: Target) -> list[AuditCase]:
    """For every model, number of rows and kind of operands the kernels that the planner picks."""
    cases = [
        case for model in MODELS for rows in ROW_COUNTS for case in _cases(model, rows, target)
    ]
    distinct = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if distinct[case.spec] is case]


def _cases(model: Latents, rows: int, target: Target) -> Iterator[AuditCase]:
    chunk = Chunk(rows, _meta(2, dtype=torch.int32))
    for kind, coded, narrow in (
        ("values", False, False), ("codes", True, False), ("8-bit core", True, True),
        ("values, 8-bit core", False, True),
    ):  # fmt: skip
        a = model.arguments(rows, coded=coded, narrow=narrow)
        name = f"mla {model.name} {kind} K={rows}"
        buffers = key_buffers(a, chunk)
        for call in latent_launches(a, chunk, buffers):
            spec, _, _ = latent_kernel(call, target)
            yield AuditCase(f"{name} latents", spec, Expectations())
        problem = up_problem(a, buffers)
        yield up_case(name, problem, rows, target)
        if not coded and not narrow:
            limited = replace(problem, limited=True)
            yield up_case(f"{name} limited", limited, rows, target)
    a = model.arguments(rows, coded=True)
    numbers = kernels.weight_numbers_spec(numbers_problem(a), "bf16", target.name)
    yield AuditCase(f"mla {model.name} numbers", numbers, Expectations())


def up_case(name: str, problem: UpProblem, rows: int, target: Target) -> AuditCase:
    """The up-projection of a problem, and what it has to show."""
    config = up_config(problem, rows, target)
    specialised = config.warp_specialize and not problem.limited
    claims = Expectations(
        mma=problem.latent_type,
        tma_loads=True,
        tma_stores=problem.joint,
        warp_specialized=specialised,
        stack_bytes=SPECIALISED_STACK_BYTES if specialised else 0,
        fresh_sums_reason=SCALED_SUMS_REASON if problem.scale_block else "",
    )
    spec = kernels.up_spec(problem, config, target.name)
    return AuditCase(f"{name} up: {config}", spec, claims)
