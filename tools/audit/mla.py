"""Lists the audit cases of the kernels around MLA's attention, which are compiled with every
supported release of Triton.

The cases cover the sizes of published models, weights as floats and as codes, and each kind of
store, gather and up-projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.audit import Expectations
from tilewright.codegen.formats import AWQ_ORDER
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import MlaDecodeArguments, MlaPrefillArguments, widths
from tilewright.ops.mla.decode import decode
from tilewright.ops.mla.latents.lowering import up_launch
from tilewright.ops.mla.latents.operands import Buffers, up_problem
from tilewright.ops.mla.prefill.prefill import OP
from tilewright.tools.audit.cases import (
    SOFTMAX_REASON,
    SPECIALISED_STACK_BYTES,
    AuditCase,
    audited,
    distinct,
    meta,
)

ROW_COUNTS = (64, 4096)
SCALED_SUMS_REASON = "each block of columns has its own scales"
FP8 = torch.float8_e4m3fn
# For each kind of operands, the options of `Latents.arguments`.
KINDS: dict[str, dict[str, Any]] = {
    "values": {},
    "codes": {"weight": "codes", "latents": "codes"},
    "8-bit core": {"weight": "codes", "latents": "codes", "core": FP8},
    "values, 8-bit core": {"core": FP8},
    "dequantised": {"weight": "codes"},
}


# The steps of absorbed attention: (name, tokens, options of `_decode_call`).
DECODES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("positions", 1, {}),
    ("mask tensor", 1, {"mask": "none"}),
    ("pages", 1, {"page_size": 64}),
    ("4 tokens", 4, {}),
    ("pages, an engine's step", 4, {"page_size": 256, "ragged": True}),
)


@dataclass(frozen=True)
class Codes:
    """A format of a decode step's weight.

    Attributes:
        format, block, zero_point, nibble_order: The fields of `Weight`.
        stored, scale: The dtypes of codes and of scales.
        per: The number of codes in a stored element, along (rows, columns).
        zeros: Whether there are zeros, eight in a word.
    """

    format: str
    block: tuple[int, int]
    stored: torch.dtype = torch.int32
    scale: torch.dtype = torch.bfloat16
    per: tuple[int, int] = (1, 8)
    zeros: bool = False
    zero_point: int = 0
    nibble_order: tuple[int, ...] = ()

    def of(self, a: MlaDecodeArguments) -> MlaDecodeArguments:
        """Returns the call with a weight of this format."""
        rows, rank = a.kv_b_weight.shape
        block_rows, block_columns = self.block
        grid = cdiv(rows, block_rows), cdiv(rank, block_columns)
        zero = meta(grid[0] // 8, grid[1], dtype=torch.int32) if self.zeros else None
        return replace(
            a,
            kv_b_weight=meta(rows // self.per[0], rank // self.per[1], dtype=self.stored),
            kv_b_scale=meta(*grid, dtype=self.scale),
            kv_b_zero=zero,
            weight_format=self.format,
            scale_block=self.block,
            zero_point=self.zero_point,
            nibble_order=self.nibble_order,
        )


CODES = {
    "codes": Codes("fp8", (128, 128), FP8, torch.float32, (1, 1)),
    "int4": Codes("int4_k", (1, 128), zero_point=8),
    "int4 of AWQ": Codes("int4_n", (1, 128), per=(8, 1), zeros=True, nibble_order=AWQ_ORDER),
    "int8": Codes("int8", (1, 1 << 20), torch.int8, per=(1, 1)),
    "nvfp4": Codes("nvfp4", (1, 16), torch.uint8, FP8, (1, 2)),
    "mxfp4": Codes("mxfp4", (1, 32), torch.uint8, torch.uint8, (1, 2)),
    "nf4": Codes("nf4", (1, 64), torch.uint8, torch.float32, (1, 2), nibble_order=(1, 0)),
}
# The formats that are audited for each model. For the first model, all formats are audited.
COMMON_CODES = ("codes", "int4")
# The bytes of stack that a decode kernel may use. ptxas runs out of registers, and spills addresses
# of shared memory that are constant in loops.
DECODE_STACK = 64
FEW_KEYS_REASON = (
    "32 keys are fewer than the M side of the newer tensor core instruction; only "
    "the product with the values uses it"
)


@dataclass(frozen=True)
class Latents:
    """The sizes of MLA in a published model, or in one GPU's share of the model's heads."""

    name: str
    num_heads: int
    nope: int = 128
    rope: int = 64
    v_dim: int = 128
    rank: int = 512
    granularity: int = 128

    def arguments(
        self,
        rows: int,
        *,
        weight: str = "values",
        latents: str = "values",
        core: torch.dtype | None = None,
    ) -> MlaPrefillArguments:
        """Returns a paged prefill on meta tensors. It has one sequence of `rows` tokens, and
        nothing is cached.

        `weight` and `latents` are "values", or "codes" for 8-bit codes with scales. `core` is the
        dtype of the attention.
        """
        heads, width, rank = self.num_heads, self.nope + self.rope, self.rank
        pool = meta(256, 1, 4, 128, 1, rank + self.rope)
        entries = pool[:, 0, 1]
        weight_rows, block = heads * (self.nope + self.v_dim), self.granularity
        latent = meta(rows, rank + self.rope)
        scale = meta(-(-weight_rows // block), -(-rank // block), dtype=torch.float32)
        values: dict[str, Any] = {"kv_b_weight": meta(weight_rows, rank)}
        if weight == "codes":
            codes = meta(weight_rows, rank, dtype=FP8)
            values = {"kv_b_weight": codes, "kv_b_scale": scale, "scale_block": (block, block)}
        if latents == "codes":
            values |= {"quantize_latent": True, "latent_scale_cap": 1200.0}
        table = meta(163840, self.rope, dtype=torch.float32)
        return MlaPrefillArguments(
            q=meta(rows, heads, width),
            latent=latent[:, :rank],
            k_rope=latent[:, rank:],
            latent_cache=pool,
            latent_window=CacheWindow.of(entries[..., :rank], pool).to_ints(),
            rope_window=CacheWindow.of(entries[..., rank:], pool).to_ints(),
            v_dim=self.v_dim,
            scale=width**-0.5,
            row_offsets=meta(2, dtype=torch.int32),
            keys="table",
            key_offsets=meta(2, dtype=torch.int32),
            num_keys=rows,
            slots="ragged",
            lookup_table=meta(1, 256, dtype=torch.int32),
            cache_lengths=meta(1, dtype=torch.int32),
            norm_weight=meta(rank),
            cos=table[:, ::2],
            sin=table[:, 1::2],
            rope_style="interleaved",
            rope_by_position=True,
            attention_dtype=core,
            **values,
        )


MODELS = (
    Latents("deepseek-v3", 128),
    Latents("deepseek-v2-lite", 16),
    Latents("glm-5", 8, nope=192, v_dim=256, granularity=64),
)
DECODED = (
    *MODELS[:2],
    Latents("glm-4.7-flash", 20, nope=192, v_dim=256),
    Latents("minicpm3", 40, nope=64, rope=32, v_dim=64, rank=256),
)


@audited("mla")
def mla_cases(target: Target) -> list[AuditCase]:
    """Returns the cases of the kernels that the planner picks for each model, number of rows and
    kind of operands."""
    cases = [
        case for model in MODELS for rows in ROW_COUNTS for case in _cases(model, rows, target)
    ]
    return distinct([*cases, *_decode_cases(target)])


def _decode_cases(target: Target) -> Iterator[AuditCase]:
    """Yields the cases of absorbed attention for each model in DECODED and each step in DECODES."""
    for model in DECODED:
        for name, tokens, options in DECODES:
            report = decode.OP.plan_for(_decode_call(model, tokens, **options), target.name)
            for spec in report.specs:
                if spec.kernel == "attention_decode":
                    claims = Expectations(
                        mma="bf16",
                        stack_bytes=DECODE_STACK,
                        fresh_sums_reason=SOFTMAX_REASON,
                        legacy_mma_reason=FEW_KEYS_REASON,
                    )
                    yield AuditCase(f"mla decode {model.name}, {name}", spec, claims)
                elif spec.kernel == "attention_merge":
                    yield AuditCase(f"mla merge {model.name}, {name}", spec, Expectations())
                elif spec.kernel == "head_products":
                    claims = Expectations(mma="bf16")
                    yield AuditCase(f"mla heads {model.name}, {name}", spec, claims)
        for name in CODES if model is DECODED[0] else COMMON_CODES:
            a = CODES[name].of(_decode_call(model, 1))
            for spec in decode.OP.plan_for(a, target.name).specs:
                if spec.kernel == "head_products":
                    claims = Expectations(mma="bf16", fresh_sums_reason=SCALED_SUMS_REASON)
                    yield AuditCase(f"mla heads {model.name}, {name}", spec, claims)
                elif spec.kernel == "coded_head_products":
                    claims = Expectations(mma="bf16")
                    yield AuditCase(f"mla heads {model.name}, {name}", spec, claims)


def _decode_call(
    model: Latents, tokens: int, *, mask: str = "causal", page_size: int = 0, ragged: bool = False
) -> MlaDecodeArguments:
    """Returns a step of four sequences on meta tensors, with room for 4096 keys each.

    With `ragged`, the sequences have different numbers of tokens, with an average of `tokens`.
    """
    batch, keys, width = 4, 4096, model.nope + model.rope
    pages, rows = (batch * keys // page_size, page_size) if page_size else (batch, keys)
    entries = meta(pages, rows, model.rank + model.rope)
    given: dict[str, Any] = {"cache_lengths": meta(batch, dtype=torch.int64), "mask": mask}
    if mask == "none":
        given = {"mask": mask, "attn_mask": meta(batch, 1, tokens, keys, dtype=torch.bool)}
    if page_size:
        given["block_table"] = meta(batch, keys // page_size, dtype=torch.int32)
    if ragged:
        given["row_offsets"] = meta(batch + 1, dtype=torch.int32)
        given["key_lengths"] = meta(batch, dtype=torch.int32)
    else:
        given["num_sequences"] = batch
    return MlaDecodeArguments(
        meta(batch * tokens, model.num_heads, width),
        entries[..., : model.rank],
        entries[..., model.rank :],
        meta(model.num_heads * (model.nope + model.v_dim), model.rank),
        v_dim=model.v_dim,
        scale=width**-0.5,
        **given,
    )


def _cases(model: Latents, rows: int, target: Target) -> Iterator[AuditCase]:
    for kind, options in KINDS.items():
        name = f"mla {model.name} {kind} K={rows}"
        a = model.arguments(rows, **options)
        for spec in OP.plan_for(a, target.name).specs:
            if spec.kernel == "mla_latents":
                yield AuditCase(f"{name} latents", spec, Expectations())
            if spec.kernel == "mla_weight_numbers":
                yield AuditCase(f"{name} weight", spec, Expectations())
            if spec.kernel == "mla_up_projection":
                yield up_case(f"{name} up", spec)
    # For float weights a library computes the keys, unless the call limits the rows. These cases
    # audit the kernel with and without such a limit.
    buffers = Buffers(meta(rows, model.rank), meta(rows, model.rope))
    a = model.arguments(rows)
    problem, (nope, _, v_dim) = up_problem(a, buffers), widths(a)
    keys = meta(rows, problem.num_heads, nope + v_dim).split((nope, v_dim), -1)
    for name, limit in (("up", None), ("limited up", meta(1, dtype=torch.int64))):
        given = replace(problem, limited=limit is not None)
        weight = a.kv_b_weight
        step, _ = up_launch(a, given, buffers, weight, keys, target, rows=rows, limit=limit)
        yield up_case(f"mla {model.name} values K={rows} {name}", step.spec)


def up_case(name: str, spec: KernelSpec) -> AuditCase:
    """Returns the case of an up-projection."""
    specialised = bool(spec.constant("WARP_SPECIALIZE"))
    claims = Expectations(
        mma=dict(spec.signature)["latent_ptr"].removeprefix("*"),
        tma_loads=True,
        tma_stores=bool(spec.constant("JOINT")),
        warp_specialized=specialised,
        stack_bytes=SPECIALISED_STACK_BYTES if specialised else 0,
        fresh_sums_reason=SCALED_SUMS_REASON if spec.constant("SCALE_BLOCK") != (1, 1) else "",
    )
    return AuditCase(name, spec, claims)
