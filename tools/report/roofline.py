"""FLOPs and bytes of a fused site beside the target's limits: the roofline plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.targets import Target
from tilewright.compiler import GraphReport, Site, _compat
from tilewright.compiler.report.work import flop_rate, flops_of, share_of_experts
from tilewright.ops.contract import get_op


@dataclass(frozen=True)
class Work:
    """What a site computes, and the bytes it reads and writes.

    flops: of the matrix products it replaces. bytes: every operand read once and every result
    written once, but caches, of which a step writes little; of a mixture only as many experts as
    tokens reach that are spread evenly. rate: the target's FLOP/s for the activation's dtype.
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
    flops = sum(map(flops_of, absorbed))
    if node is None or not flops:
        return None
    op = get_op(node.meta["tilewright"]["op"])
    names = [argument.name for argument in op.torch_op._schema.arguments]
    given = zip(names, node.args, strict=False)
    written = {argument for name, argument in given if name in op.mutated}
    read = [n for n in node.all_input_nodes if n not in written]
    tensors = _compat.tensors_of(*read, node)
    share = share_of_experts(site)
    sizes = [t.numel() * t.element_size() * (share if t.dim() == 3 else 1) for t in tensors]
    if not all(isinstance(size, (int, float)) for size in sizes):
        return None
    return Work(flops, int(sum(sizes)), flop_rate(tensors, target))


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
