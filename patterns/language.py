"""The pattern language. A pattern examines an anchor, and the result is a `Match` or a `Miss`,
never None.

A user's own pattern is registered in the same way as the built-in patterns. Its class needs no base
class: define `name`, `op`, `anchors` and `match`, and call :func:`register`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NoReturn, Protocol, get_args

from torch import fx

from tilewright.codegen.names import did_you_mean
from tilewright.patterns import effects
from tilewright.patterns.codes import CODES as CODES
from tilewright.patterns.codes import WEIGHTS as WEIGHTS
from tilewright.patterns.codes import Weight as Weight
from tilewright.patterns.codes import register_code as register_code
from tilewright.patterns.dataflow import (
    Dataflow,
    Value,
    View,
    remembering,
    scope_of,
    source_of,
)
from tilewright.patterns.effects import Effect, Size
from tilewright.patterns.hints import hint_for, with_declare


class Stage(IntEnum):
    """How far an attempt to match got. If an anchor has several misses, the miss with the highest
    stage is reported."""

    ANCHORED = 0
    ACTIVATION = 1
    K_PATH = 2
    V_PATH = 3
    Q_PATH = 4
    GUARDS = 5
    HAZARDS = 6
    CAPABILITY = 7

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


#: The `pattern` of misses about code that Dynamo did not capture.
CAPTURE = "capture"
#: The `pattern` of misses about operations that no pattern recognises.
CENSUS = "census"
#: The code of the census's misses.
UNRECOGNISED = "UNRECOGNISED"


@dataclass(frozen=True)
class Place:
    """A node whose graph is not kept, described by its name, its module and its line of source."""

    name: str
    scope: str
    source: str


@dataclass(frozen=True)
class Miss:
    """The reason why an anchor did not become a match.

    Attributes:
        pattern: The name of the pattern.
        code: A stable identifier; see :data:`CODES`.
        stage: How far the attempt got.
        message: What was expected and what was found, in the user's terms.
        nodes: The nodes of the graph that caused the miss.
        hint: What the user can do. The default is the hint of the code (`patterns/hints.py`).
        count: The number of anchors that the miss stands for.
        weight: `lost` or `advice`; None for the default of the code, see :data:`WEIGHTS`. Only
            `lost` misses cause errors under `strict`, and warnings.
        covers: The nodes of the anchors, or of the match that was refused. :func:`find` adds them,
            and a census starts from them (:class:`Sought`).
    """

    pattern: str
    code: str
    stage: Stage
    message: str
    nodes: tuple[fx.Node, ...] = ()
    hint: str = ""
    count: int = 1
    weight: Weight | None = None
    covers: tuple[fx.Node, ...] = ()

    def __post_init__(self) -> None:
        if self.weight is None:
            object.__setattr__(self, "weight", WEIGHTS.get(self.code, "lost"))
        elif self.weight not in get_args(Weight):
            raise ValueError(f"weight: expected one of {get_args(Weight)}, got {self.weight!r}")
        hint = self.hint or hint_for(self.code, self.nodes)
        object.__setattr__(self, "hint", with_declare(hint, self.code, self.nodes))

    @property
    def is_lost(self) -> bool:
        return self.weight == "lost"

    @property
    def scope(self) -> str:
        place: fx.Node | Place | None = next(iter(self.nodes), None)
        if isinstance(place, fx.Node):
            return scope_of(place)
        return place.scope if place is not None else ""

    @property
    def source(self) -> str:
        place: fx.Node | Place | None = next(iter(self.nodes), None)
        if isinstance(place, fx.Node):
            return source_of(place)
        return place.source if place is not None else ""

    def without_graph(self) -> Miss:
        """Returns a copy that does not keep the graph alive: each of `nodes` becomes a
        :class:`Place`, and `covers` is empty."""
        places = tuple(Place(n.name, scope_of(n), source_of(n)) for n in self.nodes)
        made = copy(self)  # a new Miss would compute its hint again, which needs nodes
        object.__setattr__(made, "nodes", places)
        object.__setattr__(made, "covers", ())
        return made

    def __str__(self) -> str:
        place = f"{self.scope or 'graph'} ({self.source})" if self.source else self.scope or "graph"
        # Every attempt reaches the first stage, so its name says nothing.
        stage = "" if self.stage is Stage.ANCHORED else f" {self.stage.label}"
        stop = "" if self.message.endswith(".") else "."
        hint = f"{stop} Hint: {self.hint}" if self.hint else ""
        return f"{place}{stage}, {self.code}: {self.message}{hint}"


@dataclass(frozen=True)
class Result:
    """An output of the fused op that replaces a value of the user's graph. A match has one Result
    for each value that is read from outside of the match.

    Attributes:
        replaced: The value that the output replaces. It is equal to `output[effect] * factor +
            added`.
        effect: The selection of the output's elements.
        output: The index of the output, for an op that returns several outputs.
        factor: The number that multiplies the selected elements.
        added: A view that has the value's shape and dtype; None if nothing is added.
    """

    replaced: Value
    effect: Effect
    output: int = 0
    factor: float = 1.0
    added: View | None = None

    @classmethod
    def of_rows(
        cls, replaced: Value, made: Sequence[Size], output: int = 0, added: View | None = None
    ) -> Result:
        """Returns the Result for a value that is a whole output of shape [T, columns], after a
        reshape."""
        rows, columns = made
        if replaced.shape[1:] == (columns,):  # the number of rows may be any expression
            return cls(replaced, effects.identity(replaced.shape), output, added=added)
        effect = effects.reshape(effects.identity((rows, columns)), replaced.shape)
        return cls(replaced, effect, output, added=added)


@dataclass(frozen=True)
class Parts:
    """A value whose views become views of the op's output. The value itself disappears.

    Attributes:
        replaced: The value that disappears.
        restate: A function that converts an effect on `replaced` to the effect on the output that
            selects the same elements. It raises InexpressibleError for elements that the output
            does not have.
        output: The index of the output.
    """

    replaced: Value
    restate: Callable[[Effect], Effect]
    output: int = 0


@dataclass(frozen=True)
class Match:
    """A subgraph, and the fused op that replaces it.

    Attributes:
        anchor: The value from which the pattern found the match.
        arguments: The arguments, by their names in the op's schema: views (the rewriter builds
            them), numbers, strings or None.
        results: The values of the graph, or parts of them, that the op's output replaces.
        absorbed: The values that disappear.
        stores: The in-place writes that the op performs. The op is inserted at the place of the
            last one. If there are no writes, the op is inserted at the place of the last replaced
            value.
        facts: What reports and snapshots print about the site: heads, rotation, kind of write, ...
        scope: The module of the site.
        scratch: In-place writes to memory that the graph itself allocated and that only absorbed
            values read (`y += bias`, `out[order] = y`). These writes disappear when the match is
            rewritten.
        needs_kernel: Whether the graph is left unchanged on a GPU for which the op has no kernel.
        miss_weight: The weight of the miss that the match becomes if it cannot be rewritten; None
            for the default of the miss's code.
        pattern: The name of the pattern. :func:`attempt` sets it.
        op: The name of the op in `torch.ops.tilewright`, or `namespace::name`. :func:`attempt` sets
            it.
    """

    anchor: Value
    arguments: Mapping[str, Any]
    results: tuple[Result | Parts, ...] = ()
    absorbed: tuple[Value, ...] = ()
    stores: tuple[Value, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    scratch: tuple[Value, ...] = ()
    needs_kernel: bool = False
    miss_weight: Weight | None = None
    pattern: str = ""
    op: str = ""

    @property
    def source(self) -> str:
        return self.anchor.source

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of all values that the op replaces, and of all writes that it performs."""
        replaced = (result.replaced for result in self.results)
        values = (*self.absorbed, *self.stores, *self.scratch, *replaced)
        return tuple(dict.fromkeys(value.node for value in values))


class Reject(Exception):
    """Carries a Miss out of a pattern's helper functions. :func:`attempt` returns this Miss."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss)  # formatted on demand, because most rejections are caught
        self.miss = miss


def reject(
    code: str,
    stage: Stage,
    message: str,
    *culprits: Value | View | fx.Node,
    hint: str = "",
    weight: Weight | None = None,
) -> NoReturn:
    """Ends the attempt with the Miss that :func:`miss_at` makes from the same arguments."""
    raise Reject(miss_at(code, stage, message, *culprits, hint=hint, weight=weight))


def miss_at(
    code: str,
    stage: Stage,
    message: str,
    *culprits: Value | View | fx.Node,
    hint: str = "",
    weight: Weight | None = None,
) -> Miss:
    """Returns a Miss of the current pattern. Raises ValueError if `code` is not in :data:`CODES`;
    :func:`register_code` adds codes."""
    if code not in CODES:
        raise ValueError(
            f"miss code {code!r} is not known; give it a meaning: register_code({code!r}, ...)"
        )
    nodes = tuple(_node(c) for c in culprits)
    return Miss("", code, stage, message, nodes, hint, weight=weight)


def _node(culprit: Value | View | fx.Node) -> fx.Node:
    if isinstance(culprit, View):
        culprit = culprit.value
    return culprit.node if isinstance(culprit, Value) else culprit


@contextmanager
def as_advice(*culprits: Value | View | fx.Node) -> Iterator[None]:
    """Gives the weight `advice` to every miss that is raised in this context. Patterns use it if a
    fusion would gain nothing, or if the purpose of the nodes is unknown.

    culprits: the nodes that the miss refers to if the cause is a layout that no view can express.
    """
    try:
        yield
    except Reject as rejection:
        raise Reject(replace(rejection.miss, weight="advice")) from None
    except effects.InexpressibleError as error:
        nodes = tuple(_node(c) for c in culprits)
        miss = Miss("", "LAYOUT", Stage.ANCHORED, str(error), nodes, weight="advice")
        raise Reject(miss) from None


#: The kinds of operations that a census counts: products, softmaxes, writes to memory from outside
#: of the graph, and choices.
Kind = Literal["product", "softmax", "write", "top-k"]


@dataclass(frozen=True)
class Sought:
    """Describes a pattern's anchors for people, and lists the operations that its misses account
    for.

    Attributes:
        what: A description in one line.
        near: The operations that a report lists as the most similar ones if there is no anchor.
            They have the names that `patterns.dataflow` uses; an in-place write is a "store".
        before: Kinds of operations. Besides the nodes of its anchor, a miss accounts for the first
            operations of these kinds upstream of the anchor.
        behind: Kinds of operations. A miss also accounts for the first operations of these kinds
            downstream of its anchor.
        depth: How many consecutive products upstream a miss accounts for.
        beside: Whether a miss also accounts for other products of the same activation.
    """

    what: str = ""
    near: frozenset[str] = frozenset()
    before: frozenset[Kind] = frozenset()
    behind: frozenset[Kind] = frozenset()
    depth: int = 1
    beside: bool = False


def sought_by(pattern: Any) -> Sought:
    """Returns what a pattern looks for, from its attribute `sought`."""
    found = getattr(pattern, "sought", None)
    return found if isinstance(found, Sought) else Sought()


class Pattern(Protocol):
    """A family of subgraphs that one op replaces.

    A pattern may have these attributes:

    - `sought`: a :class:`Sought`.
    - `asked_before`: the names of patterns that would otherwise match the anchors of this pattern.
      This pattern is tried before them.
    - `asked_last`: if true, the pattern is tried after all patterns without this attribute.
    - `optional`: if true, the unfused graph is good enough where the op has no kernel. Each match
      of the pattern then has `needs_kernel`, and each of its misses is advice.
    - `speaks_for`: the names of patterns that match nothing where this pattern misses. If the
      option `strict` names one of them, a miss of this pattern raises an error.

    A pattern may also have a method `asked_afterwards`, which takes the Dataflow of the graph. If
    it returns True, the pattern is tried after all other patterns have rewritten the graph. The
    anchors of such a pattern are the tensors that fused ops read or return.
    """

    @property
    def name(self) -> str:
        """The name of the pattern in reports, options and snapshots."""

    @property
    def op(self) -> str:
        """The op that matches are rewritten to."""

    def anchors(self, flow: Dataflow) -> Iterable[Any]:
        """Yields the anchors. They should be nodes that are quick to find and that occur in every
        way to write the subgraph."""

    def match(self, anchor: Any, flow: Dataflow) -> Match:
        """Returns the match at this anchor. If there is none, raises :class:`Reject` with the
        reason."""


def attempt(pattern: Pattern, anchor: Any, flow: Dataflow) -> Match | Miss:
    """Returns the match of one pattern at one anchor, or the miss that explains why there is no
    match."""
    if isinstance(anchor, Missed):
        return replace(anchor.miss, pattern=pattern.name)
    answer = _attempt(pattern, anchor, flow)
    if not getattr(pattern, "optional", False):
        return answer
    if isinstance(answer, Match):
        return replace(answer, needs_kernel=True, miss_weight="advice")
    return replace(answer, weight="advice")


def _attempt(pattern: Pattern, anchor: Any, flow: Dataflow) -> Match | Miss:
    try:
        return _checked(pattern, pattern.match(anchor, flow))
    except Reject as rejection:
        return replace(rejection.miss, pattern=pattern.name)
    except effects.InexpressibleError as error:
        nodes = _anchor_nodes(anchor) or tuple(v.node for v in anchored_stores(anchor))[:1]
        return Miss(pattern.name, "LAYOUT", Stage.ANCHORED, str(error), nodes)


def _anchor_nodes(anchor: Any) -> tuple[fx.Node, ...]:
    """Returns the node that an anchor starts from, if the anchor has one."""
    if isinstance(anchor, Missed):
        return anchor.miss.nodes[:1]
    node = getattr(anchor, "node", None) or getattr(getattr(anchor, "first", None), "node", None)
    return (node,) if isinstance(node, fx.Node) else ()


@dataclass(frozen=True)
class Missed:
    """An anchor that is already known to be a miss. :func:`attempt` returns this miss.

    Attributes:
        miss: The miss that the anchor becomes.
        stores: The writes that a match would perform.
        values: Other values that the miss accounts for.
        products: Products that the miss accounts for.
    """

    miss: Miss
    stores: tuple[Value, ...] = ()
    values: tuple[Value, ...] = ()
    products: tuple[Value, ...] = ()


class PatternError(RuntimeError):
    """Raised when a pattern breaks its contract, or raises an exception other than Reject. The
    message has the name of the pattern."""


def _checked(pattern: Pattern, answer: Any) -> Match:
    """Returns the answer if it is a valid match. Raises PatternError if it is not."""
    if not isinstance(answer, Match):
        raise PatternError(
            f"pattern {pattern.name!r}: match returned {answer!r}; return a Match or reject(...)"
        )
    for name, argument in answer.arguments.items():
        if isinstance(argument, Value):
            raise PatternError(
                f"pattern {pattern.name!r}: argument {name!r} is a Value; give a View of it, "
                "e.g. value.whole"
            )
    if any(value.store is None for value in answer.stores):
        raise PatternError(
            f"pattern {pattern.name!r}: stores are the in-place writes (op 'store') that the op "
            f"performs, got {answer.stores}; leave them empty if it writes nothing"
        )
    return replace(answer, pattern=pattern.name, op=answer.op or pattern.op)


_REGISTRY: dict[str, Pattern] = {}


def register(pattern: Pattern) -> Pattern:
    """Adds a pattern. Adding the same pattern twice does nothing. Raises ValueError if a pattern of
    another type has the same name.

    An anchor goes to the first pattern that matches. Patterns are tried in the order of
    registration, with two exceptions: a pattern comes before the patterns in its `asked_before`,
    and patterns with `asked_last` come last.
    """
    known = _REGISTRY.get(pattern.name)
    if known is not None and type(known) is not type(pattern):
        raise ValueError(
            f"pattern name {pattern.name!r} is taken by {type(known).__module__}."
            f"{type(known).__qualname__}; give {type(pattern).__qualname__} another name"
        )
    _REGISTRY.setdefault(pattern.name, pattern)
    return pattern


def unregister(name: str) -> None:
    """Removes a pattern. Raises KeyError if the name is unknown."""
    del _REGISTRY[name]


def registered(names: Sequence[str] | None = None) -> tuple[Pattern, ...]:
    """Returns the registered patterns in the order in which they are tried.

    names: the names of the patterns to return. A leading `-` excludes a pattern; if all names have
    it, all other patterns are returned. If `names` is None, all patterns are returned. Raises
    ValueError if the list is empty, if a name is unknown, if a name is both wanted and excluded, or
    if two patterns must each come before the other.
    """
    if names is None:
        return _in_order()
    if isinstance(names, str):
        raise ValueError(f"patterns: expected a list of names, got the string {names!r}")
    if not names:
        raise ValueError("patterns: expected names, or None for all patterns; got an empty list")
    unknown = [n for n in names if n.lstrip("-") not in _REGISTRY]
    if unknown:
        near = did_you_mean(unknown[0].lstrip("-"), _REGISTRY)
        known = sorted(_REGISTRY)
        raise ValueError(f"patterns: unknown {unknown}; registered are {known}{near}")
    left_out = {n[1:] for n in names if n.startswith("-")}
    wanted = {n for n in names if not n.startswith("-")}
    if both := sorted(wanted & left_out):
        raise ValueError(f"patterns: {both} are both wanted and excluded (-)")
    wanted = wanted or set(_REGISTRY)
    return tuple(p for p in _in_order() if p.name in wanted - left_out)


def spoken_for(name: str) -> frozenset[str]:
    """Returns the name, and the names in `speaks_for` of the pattern with this name."""
    return frozenset((name, *getattr(_REGISTRY.get(name), "speaks_for", ())))


def _in_order() -> tuple[Pattern, ...]:
    """Returns all patterns, each after the patterns that must come before it."""
    found: dict[str, Pattern] = {}
    ends = [pattern for pattern in _REGISTRY.values() if getattr(pattern, "asked_last", False)]
    earlier: dict[str, list[Pattern]] = defaultdict(list)
    for pattern in _REGISTRY.values():
        for name in getattr(pattern, "asked_before", ()):
            earlier[name].append(pattern)

    def add(pattern: Pattern, waiting: tuple[str, ...] = ()) -> None:
        if pattern.name in waiting:
            raise ValueError(
                f"asked_before: no order is possible, because each of {waiting} "
                "must be tried before another of them"
            )
        for other in earlier[pattern.name]:
            if other.name not in found:
                add(other, (*waiting, pattern.name))
        found.setdefault(pattern.name, pattern)

    for pattern in (*(p for p in _REGISTRY.values() if p not in ends), *ends):
        add(pattern)
    return tuple(found.values())


@dataclass
class Findings:
    """All matches and misses of one graph."""

    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)


Check = Callable[[Match, Dataflow], Miss | None]
#: A function that makes the miss for an exception. Its arguments are the pattern's name, a phrase
#: that says what the pattern was doing, the exception, and the nodes of the site.
Failed = Callable[[str, str, Exception, tuple[fx.Node, ...]], Miss]

REPORT_IT = (
    "this is an error in the pattern or in tilewright, not in the model; if "
    "TILEWRIGHT_REPRO=<folder> is set, tilewright writes a file there that reproduces the "
    "error: attach this file to your report"
)


def internal_miss(
    pattern: str, doing: str, error: Exception, nodes: tuple[fx.Node, ...] = ()
) -> Miss:
    """Returns the miss for a site at which `pattern`, or tilewright itself, raised an unexpected
    exception."""
    what = str(error)
    if not isinstance(error, PatternError):
        what = f"pattern {pattern!r} failed {doing}: {type(error).__name__}: {error}"
    return Miss(pattern, "INTERNAL", Stage.ANCHORED, what, nodes, REPORT_IT)


@remembering()
def find(
    flow: Dataflow,
    patterns: Sequence[Pattern],
    check: Check | None = None,
    failed: Failed = internal_miss,
) -> Findings:
    """Returns all matches of all patterns. For every anchor that no pattern matched, returns the
    miss with the highest stage.

    An unexpected exception affects only its anchor: `failed` makes a miss of the exception.

    A store goes to the first pattern whose match with it passes `check`. If a later pattern matches
    a store that an earlier pattern missed, the earlier miss is kept, because it is more
    informative. The earlier miss is dropped if the later match also absorbs the written value,
    because the whole site is fused then. For the same reason, a miss is dropped if matches absorb
    all its anchors.

    A pattern whose attribute `takes_leftovers` is true is not tried at values that a match absorbs.
    Matches of such a pattern do not absorb anchors of other patterns, and they drop only misses of
    patterns that have the same op.
    """
    found = Findings()
    taken: set[Value] = set()
    absorbed: set[Value] = set()
    said: dict[tuple[str, tuple[fx.Node, ...]], int] = {}
    furthest: dict[Value, Stage] = {}
    ops: dict[int, str] = {}  # the op that each missed pattern would have inserted
    sites: dict[int, list[Value]] = defaultdict(list)
    whole: set[Value] = set()  # absorbed values, and the writes of matches that absorb values
    # For each op, the values that patterns with `takes_leftovers` absorb.
    by_op: dict[str, set[Value]] = defaultdict(set)
    written: dict[str, set[Value]] = defaultdict(set)  # the stores that each pattern takes
    for pattern in patterns:
        for anchor in _anchors(pattern, flow, found, failed):
            stores = list(anchored_stores(anchor))
            if taken.intersection(stores):
                continue
            leftovers = getattr(pattern, "takes_leftovers", False)
            if leftovers and absorbed.intersection(stores):
                continue
            answer = _answer(pattern, anchor, flow, check, failed)
            if isinstance(answer, Match):
                found.matches.append(answer)
                taken.update(answer.stores)
                written[pattern.name].update(answer.stores)
                absorbed.update(answer.absorbed)
                whole.update(answer.stores if answer.absorbed else ())
                (by_op[pattern.op] if leftovers else whole).update(answer.absorbed)
                continue
            if getattr(anchor, "again", False) and answer.code != "INTERNAL":
                continue
            for store in stores:
                furthest[store] = max(answer.stage, furthest.get(store, answer.stage))
            at = said.setdefault((answer.code, answer.nodes), len(found.misses))
            if at == len(found.misses):
                found.misses.append(answer)
                ops[at] = pattern.op
            sites[at].extend(stores)
            covers = (*found.misses[at].covers, *answer.covers, *anchor_nodes(anchor))
            found.misses[at] = replace(found.misses[at], covers=tuple(dict.fromkeys(covers)))
    found.misses = [
        miss
        for at, miss in enumerate(found.misses)
        if not _outdone(miss, sites[at], furthest, (whole, by_op[ops.get(at, "")]))
        and not (sites[at] and written[miss.pattern].issuperset(sites[at]))
    ]
    return found


def _outdone(
    miss: Miss, stores: list[Value], furthest: Mapping[Value, Stage], fused: Sequence[Set[Value]]
) -> bool:
    """Whether a miss can be dropped. It can be dropped if matches have fused its whole site, or if
    it is only about a write at which another pattern reached a higher stage."""
    inside = all(any(store in values for values in fused) for store in stores)
    if stores and inside and miss.code != "INTERNAL":
        return True
    only_anchored = miss.stage == Stage.ANCHORED and miss.code in ("LONE_WRITE", "EARLIER_GRAPH")
    return only_anchored and any(furthest[s] > Stage.ANCHORED for s in stores if s in furthest)


def _anchors(pattern: Pattern, flow: Dataflow, found: Findings, failed: Failed) -> list[Any]:
    """Returns the pattern's anchors up to the first exception. If there is an exception, adds a
    miss for it to `found`."""
    anchors: list[Any] = []
    try:
        for anchor in pattern.anchors(flow):
            anchors.append(anchor)
    except Exception as error:
        found.misses.append(failed(pattern.name, "at its anchors", error, ()))
    return anchors


def _answer(
    pattern: Pattern, anchor: Any, flow: Dataflow, check: Check | None, failed: Failed
) -> Match | Miss:
    doing, nodes = "to match", _anchor_nodes(anchor)
    if any(map(_is_empty, nodes)):
        message = "the site computes a tensor without elements"
        return Miss(pattern.name, "EMPTY", Stage.ANCHORED, message, nodes)
    try:
        answer = attempt(pattern, anchor, flow)
        if isinstance(answer, Match) and check is not None:
            doing, nodes = "in the check for hazards", (answer.anchor.node,)
            refused = check(answer, flow)
            return answer if refused is None else replace(refused, covers=answer.nodes)
        return answer
    except Exception as error:
        return failed(pattern.name, doing, error, nodes)


def _is_empty(node: fx.Node) -> bool:
    """Whether a node's tensor certainly has no elements."""
    shape = getattr(node.meta.get("example_value"), "shape", ())
    return any(isinstance(n, int) and n == 0 for n in shape)


def anchored_stores(anchor: Any) -> Iterator[Value]:
    """Yields the in-place writes that an anchor starts from."""
    items = anchor if isinstance(anchor, tuple) else getattr(anchor, "stores", (anchor,))
    return (v for v in items if isinstance(v, Value))


def anchor_nodes(anchor: Any) -> tuple[fx.Node, ...]:
    """Returns the nodes of an anchor: its own node, and the nodes of its writes, `values` and
    `products`."""
    lists = (getattr(anchor, name, ()) for name in ("values", "products"))
    values = (*anchored_stores(anchor), *(value for listed in lists for value in listed))
    return tuple(dict.fromkeys((*_anchor_nodes(anchor), *(value.node for value in values))))
