"""Lists the audit cases of attention over a cache. Their kernels are compiled with every supported
release of Triton.

The shapes come from published models. The masks are the ones that `generate()` passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilewright.codegen.attention.mask_kernels import PROGRAMS_PER_SM
from tilewright.codegen.audit import Expectations
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.attention import cache_attention, mask_blocks
from tilewright.ops.attention.block_lists import MaskBlocksArguments
from tilewright.ops.attention.cache_attention import AttentionArguments
from tilewright.tools.audit.cases import SOFTMAX_REASON, AuditCase, audited, distinct, meta, planned

# Entries (sequences, queries, keys, dtype of the mask) for decode steps, for prefills, and for a
# cache of 1000 keys. In a mask of numbers, the lowest number hides a key, as in eager attention.
MASKS = (
    (64, 1, 2048, torch.bool),
    (1, 1, 131072, torch.bool),
    (8, 1024, 2048, torch.bool),
    (1, 8192, 8192, torch.bool),
    (16, 4, 1000, torch.bool),
    (64, 1, 2048, torch.bfloat16),
    (8, 1024, 2048, torch.bfloat16),
    (1, 512, 512, torch.float32),
)


# Heads are given as (query heads, key heads, head dim). CALLS maps each name to (heads, options of
# `_call`).
LLAMA, GEMMA2, GPT_OSS = (32, 8, 128), (8, 4, 256), (64, 8, 64)
CALLS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "Llama-3-8B": (LLAMA, {}),
    "Llama-3-8B, mask tensor": (LLAMA, {"mask": "tensor"}),
    "Llama-3-8B, pages": (LLAMA, {"page_size": 64}),
    "Llama-3-8B, pages of 16": (LLAMA, {"page_size": 16}),
    "Llama-3-8B, fp8 cache": (LLAMA, {"dtype": torch.float8_e4m3fn}),
    "Qwen3-30B-A3B": ((32, 4, 128), {"mask": "tensor"}),
    "Gemma-2-2B, window": (GEMMA2, {"window": 4096, "softcap": 50.0}),
    "gpt-oss, window": (GPT_OSS, {"window": 128, "sinks": True}),
}
# Entries (sequences, queries of each sequence, keys for which each sequence has room).
SIZES = ((1, 1, 8192), (64, 1, 2048), (16, 4, 2048), (1, 1024, 2048), (1, 8192, 8192))
# The steps of an engine read one memory that has the rows of all layers, in pages of 256 with a
# block table. ENGINES maps names to (heads, options). STEPS has entries (tokens, sequences,
# columns, ragged).
ENGINES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "Llama-3-8B": (LLAMA, {}),
    "Qwen3-30B-A3B": ((32, 4, 128), {}),
    "Gemma-3-4B, window": ((8, 4, 256), {"mask": "sliding_window", "window": 1024}),
    "gpt-oss, window": (GPT_OSS, {"mask": "sliding_window", "window": 128, "sinks": True}),
}
STEPS = (
    (8192, 64, 128, True), (8192, 1024, 32, True), (512, 512, 32, True), (1, 1, 128, False),
    (16, 16, 32, False), (256, 256, 32, False),
)  # fmt: skip
# The bytes of stack that a kernel may use. Triton 3.9 needs 56 for the wide heads of Gemma-2.
STACK_BYTES = 64
# The bytes of stack that a kernel for wide heads in pages may use on SM100. Triton 3.7 uses 112
# bytes, and accesses none of them in a loop.
WIDE_PAGED_STACK_BYTES = 128


@audited("attention")
def attention_cases(target: Target) -> list[AuditCase]:
    cases = [*_mask_cases(target), *_attention_cases(target), *_engine_cases(target)]
    return distinct(cases)


def _attention_cases(target: Target) -> Iterator[AuditCase]:
    for name, (heads, options) in CALLS.items():
        for sizes in SIZES:
            places = " x ".join(map(str, sizes))
            title = f"attention, {name}, {places}, {{kernel}}: {{reason}}"
            a = _call(heads, sizes, **options)
            for case in planned(title, cache_attention.OP, a, target, _claims):
                if case.spec.kernel != "mask_blocks":
                    yield case


def _engine_cases(target: Target) -> Iterator[AuditCase]:
    for name, (heads, options) in ENGINES.items():
        for tokens, sequences, columns, ragged in STEPS:
            form = "ragged" if ragged else "equal runs"
            places = f"{tokens} tokens of {sequences} sequences, {columns} pages each, {form}"
            title = f"attention of an engine, {name}, {places}, {{kernel}}: {{reason}}"
            a = _step(heads, tokens, sequences, columns, ragged, **options)
            yield from planned(title, cache_attention.OP, a, target, _claims)


def _step(
    heads: tuple[int, int, int],
    tokens: int,
    sequences: int,
    columns: int,
    ragged: bool,
    *,
    sinks: bool = False,
    **sight: Any,
) -> AttentionArguments:
    """Returns a step of an engine on meta tensors. It reads the pages of one layer in a memory that
    holds the rows of all layers."""
    query_heads, key_heads, width = heads
    rows = meta(1 << 16, key_heads, width)
    pages = rows.view(-1, 4, 2, 256, key_heads, width)
    index = {"dtype": torch.int32}
    given: dict[str, Any] = {
        "block_table": meta(sequences, columns, **index),
        "key_lengths": meta(sequences, **index),
        "cache_lengths": meta(sequences, **index),
        **({"row_offsets": meta(sequences + 1, **index)} if ragged else {}),
        **({} if ragged else {"num_sequences": sequences}),
        **({"sinks": meta(query_heads)} if sinks else {}),
        **sight,
    }
    q = meta(tokens, query_heads, width)
    return AttentionArguments(q, pages[:, 1, 0], pages[:, 1, 1], scale=width**-0.5, **given)


def _claims(spec: KernelSpec) -> Expectations:
    if spec.kernel == "attention_merge":
        return Expectations()
    most = STACK_BYTES
    if spec.kernel == "attention_prefill":
        wide = spec.constant("HEAD_BLOCK") in (256, 512) and spec.constant("PAGE_SIZE") != 1
        most = WIDE_PAGED_STACK_BYTES if wide else most
    return Expectations(mma="bf16", stack_bytes=most, fresh_sums_reason=SOFTMAX_REASON)


def _call(
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int],
    *,
    mask: str = "causal",
    window: int = 0,
    page_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    sinks: bool = False,
) -> AttentionArguments:
    """Returns a call on meta tensors. The cache is head-major, as in StaticCache, or it has
    pages."""
    (query_heads, key_heads, width), (batch, queries, keys) = heads, sizes
    pages, rows = (batch, keys)
    given: dict[str, Any] = {"cache_lengths": meta(batch, dtype=torch.int64), "mask": mask}
    if page_size:
        pages, rows = batch * keys // page_size, page_size
        given["block_table"] = meta(batch, keys // page_size, dtype=torch.int32)
    if mask == "tensor":
        given = {"mask": "none", "attn_mask": meta(batch, 1, queries, keys, dtype=torch.bool)}
    if window:
        given |= {"mask": "sliding_window", "window": window}
    if sinks:
        given["sinks"] = meta(query_heads)
    k, v = (meta(pages, key_heads, rows, width, dtype=dtype).transpose(1, 2) for _ in "kv")
    q = meta(batch * queries, query_heads, width)
    return AttentionArguments(
        q, k, v, scale=width**-0.5, num_sequences=batch, softcap=softcap, **given
    )


def _mask_cases(target: Target) -> Iterator[AuditCase]:
    for sequences, queries, keys, dtype in MASKS:
        mask = meta(sequences, 1, queries, keys, dtype=dtype)
        given = MaskBlocksArguments(mask, hide_lowest=True)
        name = f"mask blocks {sequences} x {queries} x {keys} {dtype}: {{reason}}"
        # A chip with fewer registers or threads runs fewer programs at once. This is not a fault of
        # the kernel.
        claims = Expectations(blocks_per_sm=PROGRAMS_PER_SM if target.complete else 1)
        yield from planned(name, mask_blocks.OP, given, target, claims)
