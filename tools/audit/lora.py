"""Lists the audit cases of LoRA kernels, which are compiled with every supported release of Triton.

The cases cover the sizes of published models, each regime of row counts, and each way to assign
adapters to rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.lora.plan import UNSORTED_ROWS, plan_shrink
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.lora import expand, shrink
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.lora.lowering import shrink_steps
from tilewright.ops.lora.operands import LONG_SEQUENCE, row_counts, shrink_problem
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.cases import MMA_ROWS, AuditCase, audited, distinct, meta, planned

# The numbers of tokens: one token, decode batches, a chunk of a prefill, and a whole prefill.
TOKEN_COUNTS = (1, 16, 64, 512, 8192)
FEW_ROWS_REASON = "few rows for each adapter: a weight is read once and used in few operations"
KERNEL = "{kernel}: {reason}"
OTHER_RANKS = (8, 12, 64, 128, 256)


_ATTENTION = LoraCase("", num_adapters=8, layout="stacked", scale="adapter")
LAYERS = (
    replace(_ATTENTION, name="llama3-8b", hidden=4096, widths=(4096, 1024, 1024)),
    replace(_ATTENTION, name="llama3-70b", hidden=8192, widths=(8192, 1024, 1024),
            ranks=(64, 64, 64), num_adapters=32),
    replace(_ATTENTION, name="gpt-oss-20b", hidden=2880, widths=(4096, 512, 512), ranks=(8, 8, 8)),
)  # fmt: skip
# For each way to assign adapters to the rows of a batch, the smallest and the largest number of
# tokens in its cases.
ADDRESSINGS = {
    "single": (1, 8192),
    "rows": (1, UNSORTED_ROWS),
    "sequences": (UNSORTED_ROWS + 1, 8192),
    "sorted": (UNSORTED_ROWS + 1, 8192),
}


@audited("lora")
def lora_cases(target: Target) -> list[AuditCase]:
    """Returns the cases of the shrink kernel and the expand kernel for every layer and token count.
    In these cases, rows are grouped by adapter. The first layer is also audited with the other ways
    to assign adapters to rows, and with other ranks."""
    first = LAYERS[0]
    cases = [case for layer in LAYERS for case in _token_cases(layer, "groups", target)]
    for addressing, (least, most) in ADDRESSINGS.items():
        counts = tuple(tokens for tokens in TOKEN_COUNTS if least <= tokens <= most)
        cases += _token_cases(first, addressing, target, counts)
    for rank in OTHER_RANKS:
        layer = replace(first, name=f"{first.name} rank {rank}", ranks=(rank,) * 3)
        cases += _token_cases(layer, "groups", target, (1, 64, 8192))
    # With these token counts, the planner picks tiles that no case above has.
    cases += _token_cases(replace(LAYERS[1], num_adapters=64), "groups", target, (8192,))
    many = replace(first, ranks=(128,) * 3, num_adapters=32)
    cases += _token_cases(many, "groups", target, (6144,))
    cases += _token_cases(replace(first, ranks=(32,) * 3), "groups", target, (2048,))
    for rank, tokens in ((16, 1), (16, 64), (64, 64)):
        # The layout "transposed": weights are stored as [G, K, R] and viewed as [G, R, K].
        across = replace(first, ranks=(rank,) * 3, layout="transposed")
        a = shrink.OP.sample_inputs(_of_tokens(across, "groups", tokens), "meta")
        cases += _shrink_cases(f"lora {first.name} across rank {rank} T={tokens}", a, target)
    return distinct(cases)


def _of_tokens(layer: LoraCase, addressing: str, tokens: int) -> LoraCase:
    """Returns a case with `tokens` rows. `addressing` is a key of ADDRESSINGS, or "groups"."""
    if addressing == "groups":
        others = layer.num_adapters - 1
        ids = tuple(range(layer.num_adapters))
        return replace(layer, rows="groups", sizes=(tokens, *(0,) * others), ids=ids)
    return replace(
        layer,
        rows="rows" if addressing == "sorted" else addressing,
        num_rows=tokens,
        num_sequences=tokens // LONG_SEQUENCE,
        num_adapters=1 if addressing == "single" else layer.num_adapters,
        index_dtype=torch.int64,
    )


def _token_cases(
    layer: LoraCase, addressing: str, target: Target, counts: tuple[int, ...] = TOKEN_COUNTS
) -> Iterator[AuditCase]:
    for tokens in counts:
        name = f"lora {layer.name} {addressing} T={tokens}"
        case = _of_tokens(layer, addressing, tokens)
        yield from _shrink_cases(name, shrink.OP.sample_inputs(case, "meta"), target)
        # Each of q, k and v has a separate base tensor. The planes of `s` have an odd number of
        # rows. Therefore the distance between planes is a multiple of 16 only if the rank is a
        # multiple of 16.
        given = {n: meta(tokens, width) for n, width in zip("qkv", layer.widths, strict=True)}
        given["s"] = meta(3, tokens | 1, layer.ranks[0])[:, :tokens]
        a = replace(expand.OP.sample_inputs(case, "meta"), **given)
        yield from planned(f"{name} {KERNEL}", expand.OP, a, target, claims)


def _shrink_cases(name: str, a: ShrinkArguments, target: Target) -> Iterator[AuditCase]:
    yield from planned(f"{name} {KERNEL}", shrink.OP, a, target, claims)
    if shrink.OP.plan_for(a, target.name).name == "library GEMM":
        # For these ranks a library GEMM computes the shrink. The shrink kernel is audited
        # nevertheless, because calls with other ranks of q, k and v launch it.
        config = plan_shrink(shrink_problem(a, row_counts(a, a.rows, a.rows)), a.rows, target)
        (spec,) = drive(shrink_steps(a, target, config), Planner(target), keep=True).specs
        yield AuditCase(f"{name} {spec.kernel}: {config}", spec, claims(spec))


def claims(spec: KernelSpec) -> Expectations:
    """Returns the rules that the machine code of a LoRA kernel must keep."""
    if spec.kernel == "lora_shrink_few":
        return Expectations(mma="bf16", legacy_mma_reason=FEW_ROWS_REASON)
    if spec.kernel not in ("lora_shrink", "lora_expand") or spec.constant("BLOCK_M") == 1:
        return Expectations()
    short = int(str(spec.constant("BLOCK_M"))) < MMA_ROWS
    return Expectations(
        mma="bf16",
        legacy_mma_reason=FEW_ROWS_REASON if short else "",
        memory_bound=spec.kernel == "lora_shrink",
    )
