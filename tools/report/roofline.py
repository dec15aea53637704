"""FLOPs and bytes of a fused site beside the target's limits: the roofline plot."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from tilewright.codegen.targets import Target
from tilewright.compiler import GraphReport, Site, _compat
from tilewright.ops.contract import get_op

#: Names a Triton signature has for torch's dtypes, as `Target.flops` lists them.
RATES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}


@dataclass(frozen=True)
class Work:
    """What a site computes, and the bytes it reads and writes.

    flops: of the matrix products it replaces. bytes: every operand read once and every result
    written once, but caches, of which a step writes little; of a mixture only as many experts as
    the tokens can reach. rate: the target's FLOP/s for the activation's dtype.
    """

    flops: int
    bytes: int
    rate: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def bound_us(self, target: Target) -> float:
        """The least time the target needs, in microseconds."""
        return 1e6 * max(self.flops / self.rate, self.bytes / target.hbm_bytes_per_s)


def site_work(graph: GraphReport, site: Site, target: Target) -> Work | None:
    """The work of one site; None where a size is a symbol or nothing is multiplied."""
    after = {node.name: node for node in graph.after.graph.nodes}
    before = {node.name: node for node in graph.before.graph.nodes}
    node = after.get(site.node)
    absorbed = [before[name] for name in site.absorbed if name in before]
    flops = sum(map(_flops, absorbed))
    if node is None or not flops:
        return None
    op = get_op(node.meta["tilewright"]["op"])
    names = [argument.name for argument in op.torch_op._schema.arguments]
    given = zip(names, node.args, strict=False)
    written = {argument for name, argument in given if name in op.mutated}
    read = [n for n in node.all_input_nodes if n not in written]
    tensors = _compat.tensors_of(*read, node)
    share = _share_of_experts(site)
    sizes = [t.numel() * t.element_size() * (share if t.dim() == 3 else 1) for t in tensors]
    if not all(isinstance(size, (int, float)) for size in sizes):
        return None
    dtypes = [t.dtype for t in tensors if t.dtype in RATES]
    rates = dict(target.flops)
    rate = rates.get(RATES[dtypes[0]], min(rates.values())) if dtypes else min(rates.values())
    return Work(flops, int(sum(sizes)), rate)


def _share_of_experts(site: Site) -> float:
    """The largest share of stacked expert weights [experts, ...] that the tokens can reach."""
    facts = site.shapes
    tokens = re.search(r"\[(\d+),", str(facts.get("x", "")))
    if tokens is None or not {"experts", "slots"} <= facts.keys():
        return 1.0
    return min(1.0, int(tokens[1]) * int(facts["slots"]) / int(facts["experts"]))


def _flops(node: fx.Node) -> int:
    """The FLOPs of one node, run by itself on fake tensors."""
    tensors = _compat.tensors_of(*node.all_input_nodes)
    if node.op not in ("call_function", "call_method") or not _multiplies(node, tensors):
        return 0
    if node.target in _compat.GROUPED_MM:
        rows, weight = tensors[:2]
        return 2 * math.prod(rows.shape) * weight.shape[-1]
    with FlopCounterMode(display=False) as counter:
        _compat.run_fake(node)
    return counter.get_total_flops()


_PRODUCTS = re.compile(r"linear|matmul|\bmm|bmm|einsum|grouped_mm|attention|__matmul__")


def _multiplies(node: fx.Node, tensors: Sequence[torch.Tensor]) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    concrete = all(isinstance(s, int) for t in tensors for s in t.shape)
    return concrete and bool(_PRODUCTS.search(str(name)))


def plot(points: Mapping[str, Work], target: Target) -> str:
    """The roofline of the target, with each site under it, as SVG. Needs matplotlib."""
    from tilewright.tools.report.plots import Figure, svg

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    intensities = [work.intensity for work in points.values()]
    low, high = min([0.5, *intensities]) / 2, max([2000.0, *intensities]) * 2
    for rate in sorted({work.rate for work in points.values()}):
        ridge = rate / target.hbm_bytes_per_s
        axes.plot(
            [low, ridge, high],
            [low * target.hbm_bytes_per_s / 1e12, rate / 1e12, rate / 1e12],
            color="#888",
            linewidth=1,
        )
    for label, work in points.items():
        reach = min(work.rate, work.intensity * target.hbm_bytes_per_s) / 1e12
        axes.plot([work.intensity], [reach], "o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s at best")
    axes.set_title(f"{target.name}: {target.hbm_bytes_per_s / 1e12:.1f} TB/s", fontsize=9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7)
    text = svg(figure)
    return text[text.index("<svg") :]
