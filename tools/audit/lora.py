"""LoRA kernels that every compiler release is tried on: published dims, each regime of rows, each
way to say whose row is whose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.codegen.audit import Expectations
from tilewright.codegen.lora.plan import UNSORTED_ROWS, plan_shrink
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.lora import expand, shrink
from tilewright.ops.lora.expand import ExpandArguments
from tilewright.ops.lora.lowering import shrink_steps
from tilewright.ops.lora.operands import LONG_SEQUENCE, row_counts, shrink_problem
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.cases import MMA_ROWS, AuditCase, audited, distinct, meta

# One token, decode batches, a chunk of a prefill, a whole one.
TOKEN_COUNTS = (1, 16, 64, 512, 8192)
FEW_ROWS_REASON = "a few rows of an adapter: each weight is read once and hardly computed with"
OTHER_RANKS = (8, 12, 64, 128, 256)


@dataclass(frozen=True)
class LoraLayer:
    """An attention layer with adapters. widths: of q, k and v."""

    name: str
    hidden: int
    widths: tuple[int, int, int]
    rank: int = 16
    adapters: int = 8

    def shrink(self, addressing: str, tokens: int) -> ShrinkArguments:
        """A call without memory, of a stack of weights."""
        x = meta(tokens, self.hidden)
        adapters = 1 if addressing == "single" else self.adapters
        b = x.new_empty(adapters, 3 * self.rank, self.hidden)
        return ShrinkArguments(x, b, **self._rows(addressing, tokens))

    def across(self, tokens: int) -> ShrinkArguments:
        """The same with weights [G, K, R] seen as [G, R, K]: their columns lie side by side."""
        a = self.shrink("groups", tokens)
        weight = a.a.new_empty(self.adapters, self.hidden, self.rank).mT
        return replace(a, b=None, q_weight=weight, k_weight=weight, v_weight=weight)

    def expand(self, addressing: str, tokens: int) -> ExpandArguments:
        """A call without memory. Planes of an odd number of rows: 16 does not divide their distance
        where it does not divide the rank."""
        s = meta(3, tokens | 1, self.rank)[:, :tokens]
        adapters = 1 if addressing == "single" else self.adapters
        bases = [s.new_empty(tokens, width) for width in self.widths]
        weights = [s.new_empty(adapters, width, self.rank) for width in self.widths]
        scales = s.new_empty(adapters, dtype=torch.float32)
        rows = self._rows(addressing, tokens)
        return ExpandArguments(s, *bases, *weights, scales=scales, **rows)

    def _rows(self, addressing: str, tokens: int) -> dict[str, Any]:
        if addressing == "single":
            return {}
        if addressing == "groups":
            ids = meta(self.adapters, dtype=torch.int32)
            return {"a_offsets": ids.new_empty(self.adapters + 1), "expert_ids": ids}
        count = tokens // LONG_SEQUENCE if addressing == "sequences" else tokens
        return {"expert_ids": meta(count, dtype=torch.int64)}


LAYERS = (
    LoraLayer("llama3-8b", 4096, (4096, 1024, 1024)),
    LoraLayer("llama3-70b", 8192, (8192, 1024, 1024), rank=64, adapters=32),
    LoraLayer("gpt-oss-20b", 2880, (4096, 512, 512), rank=8),
)
# How the rows of a batch are told apart where there are so many: by (least, most) tokens.
ADDRESSINGS = {
    "single": (1, 8192),
    "rows": (1, UNSORTED_ROWS),
    "sequences": (UNSORTED_ROWS + 1, 8192),
    "sorted": (UNSORTED_ROWS + 1, 8192),
}


@audited("lora")
def lora_cases(target: Target) -> list[AuditCase]:
    """For every layer and token count the shrink and the expand of groups; for the first layer the
    other forms and ranks too."""
    first = LAYERS[0]
    cases = [case for layer in LAYERS for case in _token_cases(layer, "groups", target)]
    for addressing, (least, most) in ADDRESSINGS.items():
        counts = tuple(tokens for tokens in TOKEN_COUNTS if least <= tokens <= most)
        cases += _token_cases(first, addressing, target, counts)
    for rank in OTHER_RANKS:
        layer = LoraLayer(f"{first.name} rank {rank}", first.hidden, first.widths, rank)
        cases += _token_cases(layer, "groups", target, (1, 64, 8192))
    # Tiles that only other counts get.
    cases += _token_cases(replace(LAYERS[1], adapters=64), "groups", target, (8192,))
    cases += _token_cases(replace(first, rank=128, adapters=32), "groups", target, (6144,))
    cases += _token_cases(replace(first, rank=32), "groups", target, (2048,))
    for rank, tokens in ((16, 1), (16, 64), (64, 64)):
        a = replace(first, rank=rank).across(tokens)
        cases += _shrink_cases(f"lora {first.name} across rank {rank} T={tokens}", a, target)
    return distinct(cases)


def _token_cases(
    layer: LoraLayer, addressing: str, target: Target, counts: tuple[int, ...] = TOKEN_COUNTS
) -> Iterator[AuditCase]:
    for tokens in counts:
        name = f"lora {layer.name} {addressing} T={tokens}"
        yield from _shrink_cases(name, layer.shrink(addressing, tokens), target)
        report = expand.OP.plan_for(layer.expand(addressing, tokens), target.name)
        for spec in report.specs:
            yield AuditCase(f"{name} {spec.kernel}: {report.reason}", spec, claims(spec))


def _shrink_cases(name: str, a: ShrinkArguments, target: Target) -> Iterator[AuditCase]:
    report = shrink.OP.plan_for(a, target.name)
    for spec in report.specs:
        yield AuditCase(f"{name} {spec.kernel}: {report.reason}", spec, claims(spec))
    if report.name == "library GEMM":  # other ranks of q, k and v would get the kernel
        config = plan_shrink(shrink_problem(a, row_counts(a, a.rows, a.rows)), a.rows, target)
        (spec,) = drive(shrink_steps(a, target, config), Planner(target), keep=True).specs
        yield AuditCase(f"{name} {spec.kernel}: {config}", spec, claims(spec))


def claims(spec: KernelSpec) -> Expectations:
    """What the machine code of a LoRA kernel has to show."""
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
