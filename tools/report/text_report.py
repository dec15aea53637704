"""Renders a report for a terminal: fused sites, misses with their reasons, kernels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler import Lowered, Site
from tilewright.compiler.report import collapse_misses, collapse_sites
from tilewright.patterns.language import Miss
from tilewright.tools.kernel_audit import KernelAudit
from tilewright.tools.report.looked_for import nearest_lines

if TYPE_CHECKING:
    from tilewright.tools.models.sharding import Rank

_LABEL_WIDTH = 11


def render(name: str, lowered: Lowered, audits: Sequence[KernelAudit], width: int) -> Group:
    """Renders the report of a model called `name`. Lines fold at `width` columns. `audits` may be
    empty."""
    parts: list[RenderableType] = [_head(name, lowered)]
    parts += [*_matches(lowered.matches, width), *_misses(lowered.misses, width)]
    if not lowered.matches and not lowered.misses:
        parts += _nothing(lowered, width)
    parts += [Text(f"note: {note}", style="yellow") for note in lowered.notes]
    if audits:
        parts += [Text(f"\nKernels for {lowered.target}", style="bold")]
        parts.append(render_kernels(audits, lowered.target))
    return Group(*parts)


def _nothing(lowered: Lowered, width: int) -> Iterator[RenderableType]:
    yield Text(
        "\nNothing to fuse was found. Where patterns start, and what is there:", style="bold"
    )
    for line in nearest_lines(lowered):
        yield Text(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    "))


def render_rank(rank: Rank, target: Target, width: int) -> Text:
    """Renders the work of one of several ranks in a step of the whole model."""
    text = Text(f"\nOne of {rank.tp} ranks, a step of the whole model", style="bold")
    fused = ", ".join(f"{pattern} x{count}" for pattern, count in rank.fused.items())
    read = f"{rank.weight_bytes / 1e9:.2f} GB of weights, {rank.cache_bytes / 1e9:.2f} GB of cache"
    sent = "; ".join(f"{o.kind} x{o.count}, {o.bytes / 1e6:.3g} MB each" for o in rank.collectives)
    took, moved = rank.floor_s(target), rank.communication_s(target)
    values = {
        "fused": fused or "nothing",
        "reads": f"{read}: {1e6 * took:.0f} us at least on {target.name}",
        "sends": f"{sent or 'nothing'}: {1e6 * moved:.0f} us, where nothing hides it",
        "lost": f"{100 * rank.lost_share(target):.0f} % of a step",
    }
    return text.append("\n").append(_fields(values, width))


def _head(name: str, lowered: Lowered) -> Text:
    before, after = (sum(getattr(g, n) for g in lowered.graphs) for n in ("nodes", "nodes_after"))
    seconds = sum(sum(g.seconds.values()) for g in lowered.graphs)
    count = _count(len(lowered.graphs), "graph")
    text = Text(name, style="bold")
    size = f"{before} nodes, {after} after fusion ({seconds:.2f} s)"
    # If the cost model was not fitted to measurements on the chip, times and choices are only
    # modelled.
    chip = lowered.target + ("" if get_target(lowered.target).measured else " (modelled)")
    return text.append(f"\ntarget {chip}, {count}, {size}", style="not bold")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _matches(sites: Sequence[Site], width: int) -> Iterator[RenderableType]:
    if not sites:
        return
    yield Text(f"\nFused: {_count(len(sites), 'site')}", style="bold green")
    for site, scope, count in collapse_sites(sites):
        yield _place(scope, count, f"{site.pattern} -> {site.op}", site.source)
        values = {"shapes": site.facts, "lowering": site.lowering, "reason": site.reason}
        yield _fields(values | ({"kernels": site.kernel} if site.kernel else {}), width)


def _misses(misses: Sequence[Miss], width: int) -> Iterator[RenderableType]:
    if not misses:
        return
    lost, advice = (sum(m.count for m in misses if m.is_lost is kind) for kind in (True, False))
    said = [f"Missed: {_count(lost, 'site')}"] if lost else []
    said += [f"advice on {_count(advice, 'site')}"] if advice else []
    title = ", ".join(said)
    yield Text(f"\n{title[:1].upper()}{title[1:]}", style="bold yellow")
    for miss, scope, count in collapse_misses(misses):
        what = f"{miss.pattern}  {miss.code}" + ("" if miss.is_lost else "  (advice)")
        yield _place(scope or "graph", count, what, miss.source)
        values = {miss.stage.label: miss.message}
        yield _fields(values | ({"hint": miss.hint} if miss.hint else {}), width)


def _place(scope: str, count: int, what: str, source: str) -> Text:
    text = Text(f"  {scope or 'graph'}", style="bold")
    if count > 1:
        text.append(f"  x{count}")
    text.append(f"  {what}", style="not bold cyan")
    if source:
        text.append(f"  {source}", style="not bold dim")
    return text


def _fields(values: dict[str, str], width: int) -> Text:
    """Renders labelled values below a site. They are wrapped with a hanging indent."""
    text = Text()
    indent = " " * (4 + _LABEL_WIDTH)
    # On a very narrow terminal, values still get 20 columns, and lines then fold at the edge.
    room = max(width - len(indent), 20)
    for label, value in values.items():
        lines = [line for part in value.splitlines() for line in textwrap.wrap(part, room)]
        text.append(f"    {label:<{_LABEL_WIDTH}}", style="dim")
        text.append(f"\n{indent}".join(lines)).append("\n")
    text.right_crop(1)
    return text


def graph_text(lowered: Lowered, *, before: bool, after: bool) -> str:
    """Returns the graphs as readable Python, as captured and as rewritten."""
    parts = []
    for number, graph in enumerate(lowered.graphs):
        for wanted, what, module in (
            (before, "before", graph.before),
            (after, "after", graph.after),
        ):
            if wanted:
                parts.append(f"# graph {number}, {what}")
                parts.append(module.print_readable(print_output=False))
    return "\n".join(parts)


def render_kernels(audits: Sequence[KernelAudit], target: str) -> Group:
    """Renders the kernels of a report: the facts about their machine code, the rules that they
    break, and notes."""
    return Group(kernel_table(audits, get_target(target)), *_kernel_remarks(audits))


_COLUMNS = ("kernel", "tensor core", "regs", "spills", "stack", "shared", "TMEM", "warps", "rules")


def kernel_table(audits: Sequence[KernelAudit], target: Target) -> Table:
    """Returns a table with one row for each compiled kernel. Its header shows the limits of the
    target."""
    limits = {
        "regs": f"of {target.max_registers}",
        "shared": f"of {target.max_shared_bytes}",
        "TMEM": f"of {target.tmem_columns}",
    }
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        header = f"{name}\n{limits[name]}" if name in limits else name
        folds = name in ("kernel", "tensor core")
        justify: JustifyMethod = "left" if folds or name == "rules" else "right"
        overflow: OverflowMethod = "fold" if folds else "crop"
        table.add_column(Text(header), justify=justify, no_wrap=not folds, overflow=overflow)
    for outcome in audits:
        table.add_row(*_row(outcome))
    return table


def _row(outcome: KernelAudit) -> list[Text]:
    name, audit = Text(outcome.kernel.spec.name), outcome.audit
    if audit is None:
        return [name, Text("does not compile", style="red")]
    mma = " ".join(f"{opcode} x{n}" for opcode, n in audit.mma.items()) or "none"
    numbers = [audit.registers, audit.spills, audit.stack_bytes, audit.shared_bytes]
    numbers += [audit.tmem_columns, audit.num_warps]
    return [name, Text(mma), *(Text(str(n)) for n in numbers), _verdict(outcome)]


def _verdict(outcome: KernelAudit) -> Text:
    if outcome.problems:
        return Text(f"{len(outcome.problems)} broken", style="red")
    return Text("note" if outcome.notes else "kept", "green")


def _kernel_remarks(audits: Sequence[KernelAudit]) -> Iterator[RenderableType]:
    for outcome in audits:
        last = outcome.error.strip().splitlines()[-1:] if outcome.error else []
        for line in (*outcome.problems, *last):
            yield Text(f"  {outcome.kernel.spec.name}: {line}", style="red")
        for line in outcome.notes:
            yield Text(f"  {outcome.kernel.spec.name}: note: {line}", style="dim")
