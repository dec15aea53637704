"""LoRA kernels that every compiler release is tried on: published dims, each regime of rows, each
way to say whose row is whose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.audit import Expectations
from tilewright.codegen.lora import expand_specs as lora_expand_kernels
from tilewright.codegen.lora import shrink_specs as lora_shrink_kernels
from tilewright.codegen.lora import specs as lora_kernels
from tilewright.codegen.lora.expand_specs import ExpandProblem, Projection
from tilewright.codegen.lora.library_plan import library_shrink, planes_spec
from tilewright.codegen.lora.plan import UNSORTED_ROWS, plan_expand, plan_shrink
from tilewright.codegen.lora.shrink_specs import FewShrink, ShrinkProblem, TiledShrink
from tilewright.codegen.lora.specs import RowForm
from tilewright.codegen.targets import Target
from tilewright.tools.audit.cases import MMA_ROWS, AuditCase

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

    def shrink(self, form: RowForm) -> ShrinkProblem:
        rank, hidden = self.rank, self.hidden
        strides = (3 * rank * hidden, hidden, 1)
        return ShrinkProblem("bf16", hidden, rank, (rank,) * 3, hidden, (strides,) * 3, form)

    def expand(self, form: RowForm) -> ExpandProblem:
        parts = [
            Projection(
                width, self.rank, plane, 1.0, (width * self.rank, self.rank, 1), width, width
            )
            for plane, width in enumerate(self.widths)
        ]
        odd = ("s_plane_stride",) if self.rank % 16 else ()
        return ExpandProblem("bf16", self.rank, (parts[0], parts[1], parts[2]), "fp32", form, odd)


LAYERS = (
    LoraLayer("llama3-8b", 4096, (4096, 1024, 1024)),
    LoraLayer("llama3-70b", 8192, (8192, 1024, 1024), rank=64, adapters=32),
    LoraLayer("gpt-oss-20b", 2880, (4096, 512, 512), rank=8),
)


def lora_cases(target: Target) -> list[AuditCase]:
    """For every layer and token count the shrink and the expand of groups; for the first layer the
    other forms and ranks too."""
    first = LAYERS[0]
    cases = [case for layer in LAYERS for case in _token_cases(layer, "groups", target)]
    for addressing in ("single", "rows", "sequences", "sorted"):
        cases += _token_cases(first, addressing, target)
    for rank in OTHER_RANKS:
        layer = LoraLayer(f"{first.name} rank {rank}", first.hidden, first.widths, rank)
        cases += _token_cases(layer, "groups", target, (1, 64, 8192))
    # Tiles that only other counts get.
    cases += _token_cases(replace(LAYERS[1], adapters=64), "groups", target, (8192,))
    cases += _token_cases(replace(first, rank=128, adapters=32), "groups", target, (6144,))
    cases += _token_cases(replace(first, rank=32), "groups", target, (2048,))
    cases += _across_cases(first, target)
    distinct = {case.spec: case for case in reversed(cases)}
    return [case for case in cases if distinct[case.spec] is case]


def _across_cases(layer: LoraLayer, target: Target) -> Iterator[AuditCase]:
    """Weights [K, R], whose columns lie side by side."""
    for rank, tokens in ((16, 1), (16, 64), (64, 64)):
        form = row_form(layer, "groups", tokens)
        assert form is not None
        problem = replace(layer, rank=rank).shrink(form)
        problem = replace(problem, weight_strides=((rank * layer.hidden, 1, rank),) * 3)
        config = plan_shrink(problem, tokens, target)
        spec = lora_shrink_kernels.shrink_spec(problem, config, target.name)
        name = f"lora {layer.name} across rank {rank} T={tokens}: {config}"
        yield AuditCase(name, spec, _shrink_claims(config))


def row_form(layer: LoraLayer, addressing: str, tokens: int) -> RowForm | None:
    """None where so many tokens are not told apart in this way."""
    groups = next_power_of_2(layer.adapters + 1)
    many = tokens > UNSORTED_ROWS
    if addressing == "groups":
        return RowForm("groups", layer.adapters, "i32", "i32", groups=groups)
    if addressing == "rows" and not many:
        rows = next_power_of_2(tokens)
        return RowForm("rows", layer.adapters, "i64", groups=groups, rows=rows)
    if addressing == "sequences" and many:
        return RowForm("sequences", layer.adapters, "i64", one_each=False)
    if addressing == "sorted" and many:
        return RowForm("sorted", layer.adapters, "i64", "i32", inclusive=True, groups=groups)
    return RowForm("single", 1) if addressing == "single" else None


def _token_cases(
    layer: LoraLayer, addressing: str, target: Target, counts: tuple[int, ...] = TOKEN_COUNTS
) -> Iterator[AuditCase]:
    for tokens in counts:
        form = row_form(layer, addressing, tokens)
        if form is None:
            continue
        name = f"lora {layer.name} {addressing} T={tokens}"
        shrink = layer.shrink(form)
        config = plan_shrink(shrink, tokens, target)
        spec = lora_shrink_kernels.shrink_spec(shrink, config, target.name)
        yield AuditCase(f"{name}: {config}", spec, _shrink_claims(config))
        if library_shrink(shrink, True, False, tokens) is not None:
            spec = planes_spec(shrink, target.name)
            yield AuditCase(f"{name}: planes of a library's product", spec, Expectations())
        expand = layer.expand(form)
        tile = plan_expand(expand, tokens, target)
        claims = Expectations()
        if tile.block_m > 1:
            claims = Expectations(mma="bf16", legacy_mma_reason=_reason(tile.block_m))
        spec = lora_expand_kernels.expand_spec(expand, tile, target.name)
        yield AuditCase(f"{name}: expand {tile}", spec, claims)
        if form.addressing == "sorted":
            sort = lora_kernels.order_spec(form, lora_kernels.OrderConfig(), target.name)
            yield AuditCase(f"{name}: sort", sort, Expectations())


def _shrink_claims(config: lora_shrink_kernels.ShrinkConfig) -> Expectations:
    if isinstance(config, TiledShrink):
        reason = _reason(config.block_m)
        return Expectations(mma="bf16", legacy_mma_reason=reason, memory_bound=True)
    if isinstance(config, FewShrink):
        return Expectations(mma="bf16", legacy_mma_reason=FEW_ROWS_REASON)
    return Expectations()


def _reason(block_m: int) -> str:
    return "" if block_m >= MMA_ROWS else FEW_ROWS_REASON
