"""Compares random programs with eager: captures a random model, changes its graph, fuses it, and
compares the results.

A model is drawn from `families.FAMILIES` and captured by Dynamo once for `PER_MODEL` seeds. Each
seed applies 0 to 3 of `breakages.BREAKAGES` (`dtypes.BREAKAGES` for the family of that name) to the
captured graph. If eager cannot run the result, another one is drawn. If something is fused, outputs
and inputs after the call are compared: the fused graph's error against float64 may be 1.25 times
eager's error plus one rounding.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import Unsupported

from tests.agreement import ALLOWANCE
from tests.programs import dtypes
from tests.programs.breakages import BREAKAGES, remember, told_again
from tests.programs.families import FAMILIES
from tests.programs.tally import Outcome, Tally
from tilewright.compiler._compat import tensors_in
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport
from tilewright.compiler.report.census import Point
from tilewright.compiler.verify import clone_inputs, relative_error, same_elements
from tilewright.compiler.verify.float64 import NoFloat64Error, run_in_float64, widen
from tilewright.compiler.verify.sites import SLACK
from tilewright.ops.checks import ArgumentError
from tilewright.patterns.language import CENSUS

PER_MODEL = 20
#: Families in which the models vary more than the breakages.
SEEDS_OF_MODEL = {"dtypes": 4, "coded": 10, "large": 4, "quantised": 8, "products": 8}
HOW_MANY = (0, 1, 1, 1, 2, 2, 3, 3)
OPTIONS = Options(inner="eager", target="sm100", everywhere=True)
#: A difference is called unstable if it is at most AMPLIFIED times as large as the change of
#: eager's own result when its inputs change by a rounding. TRIALS has the number of such trials at
#: first, and the number before a program is called wrong.
AMPLIFIED, TRIALS = 8.0, (6, 60)
#: Calls that return memory that nothing has written.
FRESH = ("new_empty", "empty", "empty_like", "empty_strided", "new_empty_strided")
#: The largest difference of the fused result from eager's, if an operator of the program does not
#: support float64.
ROUNDINGS = 8


@dataclass(frozen=True)
class Captured:
    """The graph of a model as Dynamo passes it to a backend, and its inputs."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    drawn: str


@dataclass(frozen=True)
class Program:
    """A graph, its inputs, and a description of the changes."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    drawn: str
    broken: tuple[str, ...]


class _GotIt(Exception):
    pass


def capture(module: Any, args: Sequence[Any], drawn: str) -> Captured:
    """Returns the single graph of a model. Passes on Dynamo's exceptions."""
    found: list[Captured] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            found.append(Captured(gm, tuple(clone_inputs(inputs)), drawn))
            raise _GotIt

        return run

    torch._dynamo.reset()
    with suppress(_GotIt):
        torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*args)
    return found[0]


def captured(family: str, number: int) -> Captured:
    """Returns model `number` of a family. If eager or Dynamo refuses a model, another one is
    drawn."""
    draw = random.Random(f"{family} {number}")
    while True:
        torch.manual_seed(number)
        try:
            module, args, drawn = FAMILIES[family](draw)
            found = capture(module, args, drawn)
            found.module.forward(*clone_inputs(found.inputs))
            return found
        except Exception:  # sizes or dtypes that do not go together
            continue


def copied(original: fx.Graph) -> fx.Graph:
    """Returns a copy whose nodes keep Dynamo's metadata."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(original, mapped := {}))
    for old, new in mapped.items():
        new.meta = dict(old.meta)
    remember(graph)
    return graph


def program(family: str, seed: int, model: Captured) -> tuple[Program, Any, list[Any]]:
    """Returns the program of a seed, eager's outputs, and the inputs after the call."""
    draw = random.Random(f"{family} program {seed}")
    breakages = dtypes.BREAKAGES if family == "dtypes" else BREAKAGES
    while True:
        graph = copied(model.module.graph)
        done: list[str] = []
        wanted = draw.choice(HOW_MANY)
        try:
            while len(done) < wanted:
                said = draw.choice(breakages)(draw, graph)
                if said is not None:
                    told_again(graph)
                    done.append(said)
            graph.lint()
            module = fx.GraphModule(model.module, graph)
            inputs = dtypes.given_as_told(graph, model.inputs)
            ours = clone_inputs(inputs)
            result = module.forward(*ours)
        except Exception:  # the program is not valid, so another program is drawn
            continue
        found = Program(module, inputs, model.drawn, tuple(done))
        return found, result, ours


def compared(program: Program, result: Any, after: list[Any]) -> Outcome:
    """Fuses a program and compares it with eager's result and inputs after the call."""
    try:
        report = fuse(program.module, OPTIONS)
    except Exception as error:
        return Outcome("raised", why=f"{type(error).__name__}: {error}")
    codes = tuple(m.code for m in report.misses)
    patterns = tuple(m.pattern for m in report.matches)
    failed = [str(m) for m in report.misses if m.code == "INTERNAL"]
    if failed:
        return Outcome("raised", patterns, codes, failed[0])
    outcome = _run(program, report, result, after)
    silent, unrecognised = _unaccounted(report)
    return replace(
        outcome, patterns=patterns, codes=codes, silent=silent, unrecognised=unrecognised
    )


def _unaccounted(report: GraphReport) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the unaccounted points of a graph's census in two groups: points that no miss names,
    and points for which a miss says that no pattern recognises them."""
    named = {node.name for m in report.misses if m.pattern == CENSUS for node in m.nodes}
    left = [point for point in report.points if point.account == "unaccounted"]
    silent, told = ([p for p in left if (p.node in named) is is_told] for is_told in (False, True))
    return tuple(map(_said, silent)), tuple(map(_said, told))


def _said(point: Point) -> str:
    return f"{point.kind} {point.op} {point.node}"


def _run(program: Program, report: GraphReport, result: Any, after: list[Any]) -> Outcome:
    if not report.matches:
        return Outcome("nothing fused")
    ours = clone_inputs(program.inputs)
    try:
        mine = report.after.forward(*ours)
    except ArgumentError as error:
        return Outcome("refused", why=str(error))
    except Exception as error:
        if not _defined(program):
            return Outcome("undefined")
        return Outcome("wrong", why=f"fused raises {type(error).__name__}: {error}")
    fused, eager = (_numbers(r, i) for r, i in ((mine, ours), (result, after)))
    verdict, why = _verdict(program, fused, eager)
    return Outcome(verdict, why=why)


def _numbers(result: Any, inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [*tensors_in(result), *tensors_in(inputs)]


def _verdict(
    program: Program, fused: list[torch.Tensor], eager: list[torch.Tensor]
) -> tuple[str, str]:
    verdict, why = judged(program, fused, eager)
    if verdict == "wrong":
        ordered, inputs = _ordered(program), clone_inputs(program.inputs)
        others = _numbers(ordered.module.forward(*inputs), inputs)
        if judged(ordered, fused, others)[0] == "same":
            return "tied", ""
    return verdict, why


def _ordered(program: Program) -> Program:
    """Returns the program with a topk that takes the first of equal numbers, like `moe_router`."""
    graph = copied(program.module.graph)
    for node in graph.nodes:
        if node.target in ("topk", torch.topk):
            node.op, node.target = "call_function", _topk_in_order
    return replace(program, module=fx.GraphModule(program.module, graph))


def _topk_in_order(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *_: bool, **__: bool
) -> Any:
    found = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk([part.narrow(dim, 0, k) for part in found])


def judged(
    program: Program, fused: list[torch.Tensor], eager: list[torch.Tensor]
) -> tuple[str, str]:
    far = [i for i, (a, b) in enumerate(zip(fused, eager, strict=True)) if not _near(a, b)]
    if not far:
        return "same", ""
    for i in far:
        a, b = fused[i], eager[i]
        if a.shape != b.shape or a.dtype != b.dtype:
            return "wrong", f"tensor {i}: {a.dtype} {a.shape}, eager {b.dtype} {b.shape}"
    seen = list(eager)
    for i in far:
        seen[i] = _without_rows_of_no_key(fused[i], eager[i])
    far = [i for i in far if not _near(fused[i], seen[i])]
    if not far:
        return "unseen", ""
    if not _defined(program):
        return "undefined", ""
    if _attends(program) and all(_nan_in_eager_alone(fused[i], eager[i]) for i in far):
        return "unseen", ""
    exact = _in_float64(program)
    worse = [i for i in far if _worse(fused[i], eager[i], seen[i], exact and exact[i])]
    if not worse:
        return "same", ""
    for trials in TRIALS:
        moved, lost = _moved_by_roundings(program, eager, trials)
        off = {i: _error_but_at(lost[i], fused[i], seen[i]) for i in worse}
        beyond = [i for i in worse if not off[i] <= AMPLIFIED * moved[i]]
        if not beyond:
            return "unstable", ""
    i = beyond[0]
    return "wrong", f"tensor {i}: {off[i]:.1e} from eager, a rounding moves it {moved[i]:.1e}"


def _without_rows_of_no_key(fused: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Returns eager's result in which zero replaces NaN, if the NaN comes from a softmax over no
    key and the op gives zero, as PyTorch's own attention does."""
    nan = eager.double().isnan()
    if not nan.any() or not bool((fused.double()[nan] == 0).all()):
        return eager
    return eager.double().masked_fill(nan, 0).to(eager.dtype)


def _attends(program: Program) -> bool:
    called = [str(node.target) for node in program.module.graph.nodes]
    return any("softmax" in name or "attention" in name for name in called)


def _nan_in_eager_alone(fused: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether the tensors differ only where eager's result is NaN.

    In eager's products, a key or value that is NaN also makes results NaN for queries that do not
    see it. In the op this happens only if the kernel reads that key or value.
    """
    if not eager.is_floating_point() or bool(fused[~eager.isnan()].isnan().any()):
        return False
    return _near(fused.nan_to_num()[~eager.isnan()], eager[~eager.isnan()])


def _in_float64(program: Program) -> list[torch.Tensor] | None:
    wide = clone_inputs(program.inputs, widen)
    try:
        return _numbers(run_in_float64(program.module, wide), wide)
    except NoFloat64Error:
        return None


def _worse(
    fused: torch.Tensor, eager: torch.Tensor, seen: torch.Tensor, exact: torch.Tensor | None
) -> bool:
    """Whether the fused result's error against float64 exceeds eager's by more than `SLACK` and a
    rounding.

    `seen` is eager's result without the rows that see no key, which are not compared. Without a
    float64 result, returns whether the fused result differs from eager's by more than a few
    roundings.
    """
    if not eager.dtype.is_floating_point:
        return True
    rounding = ALLOWANCE.get(eager.dtype, 0.0)
    if exact is None or exact.shape != eager.shape:  # bits are read as floats of another width
        return not _error(fused, seen) <= ROUNDINGS * rounding
    exact = exact.masked_fill(eager.double().isnan() & ~seen.double().isnan(), 0)
    ours, theirs = (_error(t, exact) for t in (fused, seen))
    if math.isnan(theirs):
        theirs = math.inf  # eager overflowed where float64 has a number
    return not ours <= SLACK * theirs + rounding


def _moved_by_roundings(
    program: Program, eager: list[torch.Tensor], trials: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Returns how far eager's own results move if every input moves by about one rounding. Also
    returns where their elements then become NaN, for example because zero is divided by a number
    that becomes zero."""
    generator = torch.Generator().manual_seed(0)
    moved = [0.0] * len(eager)
    without = [tensor.double().isnan() for tensor in eager]
    lost = [torch.zeros_like(nan) for nan in without]

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return tensor
        noise = torch.rand(tensor.shape, generator=generator) * 2 - 1
        return (tensor * (1 + 2 * torch.finfo(tensor.dtype).eps * noise)).to(tensor.dtype)

    for _ in range(trials):
        inputs = clone_inputs(program.inputs, nudged)
        try:
            others = _numbers(program.module.forward(*inputs), inputs)
        except Exception:  # a rounding moved an index out of range
            return [math.inf] * len(eager), lost
        for i, (a, b) in enumerate(zip(others, eager, strict=True)):
            if a.shape != b.shape:
                moved[i] = math.inf
                continue
            nan = a.double().isnan()
            lost[i] |= nan & ~without[i]
            moved[i] = max(moved[i], _error_but_at(nan | without[i], a, b))
    return moved, lost


def _error_but_at(left_out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    return relative_error(*(t.double().masked_fill(left_out, 0) for t in (a, b)))


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative_error(a.double(), b.double())


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to a rounding of the dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool(_error(a, b) <= ALLOWANCE.get(a.dtype, 0.0))


class _Filled(fx.Interpreter):
    """Runs a graph with random numbers in uninitialised memory. All integers get the same number.

    If all elements of a key were one number, they would add the same to the scores of all keys, and
    change nothing.
    """

    def __init__(self, module: fx.GraphModule, number: int) -> None:
        super().__init__(module)
        self.number = number
        self.generator = torch.Generator().manual_seed(number)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        if name not in FRESH:
            return result
        if not result.is_floating_point():
            return result.fill_(self.number)
        return result.copy_(torch.randn(result.shape, generator=self.generator))


def _defined(program: Program) -> bool:
    """Whether eager's results do not depend on uninitialised memory."""
    found = []
    for number in (0, 1):
        inputs = clone_inputs(program.inputs)
        try:
            found.append(_numbers(_Filled(program.module, number).run(*inputs), inputs))
        except Exception:  # nothing has written an index
            return False
    return all(bool(same_elements(a, b).all()) for a, b in zip(*found, strict=True))


def same_through_dynamo(program: Program, outcome: Outcome) -> str | None:
    """Compares the program's own code through torch.compile.

    Returns "" if it gives the same matches and misses, and the graph's results; otherwise returns
    the difference. Returns None if Dynamo cannot trace the program.
    """
    found: list[GraphReport] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.append(fuse(gm, OPTIONS))
        return found[-1].after.forward if found[-1].matches else gm.forward

    torch._dynamo.reset()
    ours, theirs = _parameters_again(program), clone_inputs(program.inputs)
    compiled = torch.compile(program.module, backend=backend, fullgraph=True, dynamic=False)
    try:
        fused = _numbers(compiled(*ours), ours)
    except ArgumentError:
        return "" if outcome.verdict == "refused" else "refused through Dynamo alone"
    except Unsupported:  # Dynamo does not support this breakage, such as `out=` of some views
        return None
    eager = _numbers(program.module.forward(*theirs), theirs)
    patterns = tuple(sorted(m.pattern for report in found for m in report.matches))
    codes = tuple(sorted(m.code for report in found for m in report.misses))
    for what, here, there in (
        ("matches", tuple(sorted(outcome.patterns)), patterns),
        ("misses", tuple(sorted(outcome.codes)), codes),
    ):
        if here != there:
            return f"{what} {here}, through Dynamo {there}"
    if outcome.patterns:
        verdict, why = _verdict(program, fused, eager)
        if verdict != outcome.verdict:
            return f"{outcome.verdict}, through Dynamo {verdict} {why}"
    return ""


def _parameters_again(program: Program) -> list[Any]:
    """Returns copies of the inputs. Parameters of the model are parameters again."""
    inputs = [n for n in program.module.graph.nodes if n.op == "placeholder"]
    return [
        nn.Parameter(copy, requires_grad=False)
        if isinstance(node.meta.get("example_value"), nn.Parameter)
        else copy
        for node, copy in zip(inputs, clone_inputs(program.inputs), strict=True)
    ]


# --- many of them ---------------------------------------------------------------------------------


def run(family: str, seeds: Iterable[int], dynamo_every: int = 0) -> Tally:
    """Runs the seeds of a family. Every `dynamo_every`-th seed is also run through
    torch.compile."""
    tally, model, number = Tally(), None, None
    with torch.no_grad():
        for seed in seeds:
            if seed // SEEDS_OF_MODEL.get(family, PER_MODEL) != number:
                number = seed // SEEDS_OF_MODEL.get(family, PER_MODEL)
                model = captured(family, number)
                tally.models += 1
            made, result, after = program(family, seed, model)
            outcome = compared(made, result, after)
            tally.count(seed, outcome, "; ".join(made.broken), bool(made.broken))
            if dynamo_every and seed % dynamo_every == 0 and outcome.verdict != "raised":
                differs = same_through_dynamo(made, outcome)
                said = "not traced" if differs is None else "differs" if differs else "same"
                tally.through_dynamo[said] += 1
                if differs:
                    tally.found[f"{seed} (Dynamo)"] = f"{differs} [{'; '.join(made.broken)}]"
    return tally


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off warnings. Dynamo and fake tensors warn about programs that are drawn again."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def task(family: str, first: int, stop: int, dynamo_every: int) -> Tally:
    """Calls `run`, for a process that has one thread."""
    torch.set_num_threads(1)
    with quiet():
        return run(family, range(first, stop), dynamo_every)
