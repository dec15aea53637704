"""Rules for points of a graph that are of no interest to any pattern. Each rule is a predicate on
the graph, with the reason that the census reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.compiler import _compat
from tilewright.compiler.report.points import Graph, is_unknown, plain_name
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.gains import MOST_GATED_TOKENS, MOST_TOKENS
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.patterns import effects
from tilewright.patterns.attention.cache_attention import gains
from tilewright.patterns.cache.states import continues, replaces_state
from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.language import Kind
from tilewright.patterns.mlp.linears import LEAST_COLUMNS
from tilewright.patterns.moe.combine import SHAPED_LIKE
from tilewright.patterns.moe.router import MOST_EXPERTS
from tilewright.patterns.quantised.words import holds_codes
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.attention import sketch_of
from tilewright.patterns.recognise.gemm import match_gemm, named_product

_ACTIVATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "silu", "gelu", "relu", "relu6", "sigmoid", "tanh", "softplus", "mish", "hardswish", "elu",
        "hardsigmoid", "leaky_relu", "selu", "celu", "glu", "logsigmoid", "exp", "square", "pow",
    )
)  # fmt: skip


Holds = Callable[[Value, Graph], bool]


@dataclass(frozen=True)
class Rule:
    """A kind of points that are of no interest, with the reason. `holds(value, graph)` is the
    predicate."""

    kind: Kind
    why: str
    holds: Holds


RULES: list[Rule] = []


def rule(*kinds: Kind, why: str) -> Callable[[Holds], Holds]:
    """Makes a predicate a rule for points of these kinds. The first rule that holds gives the
    reason."""

    def added(holds: Holds) -> Holds:
        RULES.extend(Rule(kind, why, holds) for kind in kinds)
        return holds

    return added


@dataclass(frozen=True)
class Behind:
    """The points that read a value, directly or through operations that are not points.

    ends: the points that read the value.
    returned: whether the graph returns a value on the way.
    activated: whether an activation is applied on the way.
    added: whether, on the way, a tensor of equal size is added that is computed neither from the
        value nor from stored tensors alone.
    gated: whether the value, or a value on the way, is an elementwise product of two tensors of its
        own shape.
    """

    ends: tuple[Value, ...]
    returned: bool
    activated: bool
    added: bool
    gated: bool


def behind(value: Value, graph: Graph) -> Behind:
    """Returns the points that read a value, directly or through operations that are not points."""
    flow = graph.flow
    through = flow.downstream(value, None, lambda v: graph.kind(v) is None)
    known = set(through)
    return Behind(
        ends=tuple(v for v in _users(through, graph) if v not in known),
        returned=any(v in flow.output_values for v in through),
        activated=any(_is_activation(v, flow) for v in through),
        added=any(_adds_other(v, known, graph) for v in through if v is not value),
        gated=any(_is_of_two(v) for v in through),
    )


def _users(values: Sequence[Value], graph: Graph) -> list[Value]:
    return list(dict.fromkeys(u for v in values for u in graph.flow.users.get(v, ())))


def _is_activation(value: Value, flow: Dataflow) -> bool:
    return value.op in _ACTIVATIONS and not _is_of_a_norm(value, flow)


def _is_of_a_norm(value: Value, flow: Dataflow) -> bool:
    """Whether a power belongs to a norm. A power belongs to a norm if it is a square of which the
    graph takes the mean or the sum, or if its exponent is negative, as in one divided by a root."""
    if value.op == "aten.pow" and isinstance(value.args[1], (int, float)) and value.args[1] < 0:
        return True
    return value.op in ("aten.pow", "aten.square") and any(
        user.op in ("aten.mean", "aten.sum") for user in flow.users.get(value, ())
    )


def _adds_other(value: Value, known: set[Value], graph: Graph) -> bool:
    if value.op not in ("aten.add", "aten.sub", "aten.addcmul"):
        return False
    others = [v for v in value.operands if v.value not in known]
    wide = [v for v in others if effects.product(v.shape) == effects.product(value.shape)]
    return any(graph.origin(v.value) == "given" for v in wide)


def _is_of_two(value: Value) -> bool:
    return value.op == "aten.mul" and [v.shape for v in value.operands] == [value.shape] * 2


@rule("product", "softmax", "write", why="an op of tilewright, which the model itself calls")
def _is_fused_already(value: Value, graph: Graph) -> bool:
    return str(value.node.target).startswith("tilewright.")


# --- products -------------------------------------------------------------------------------------


@rule("product", why="a product that a library computes, and whose result a fused op reads")
def _is_taken(value: Value, graph: Graph) -> bool:
    return any(v.node in graph.taken for v in _passed(value, graph))


@rule("product", "softmax", "top-k", why="nothing reads it")
def _is_unread(value: Value, graph: Graph) -> bool:
    return value.node not in graph.read


@rule("product", "softmax", "top-k", why="a tensor without elements")
def _is_empty(value: Value, graph: Graph) -> bool:
    return 0 in value.shape


def _tokens(value: Value) -> Any:
    gemm = match_gemm(value)
    return None if gemm is None else gemm.flat_x.shape[0]


@rule("product", why="two activations, and no weight of the model")
def _is_of_two_activations(value: Value, graph: Graph) -> bool:
    return not is_unknown(value) and not graph.weights(value)


@rule("product", why="an outer product: nothing is summed")
def _is_outer(value: Value, graph: Graph) -> bool:
    gemm = match_gemm(value)
    if gemm is not None:
        return gemm.x.shape[-1] == 1
    return plain_name(value) in ("matmul", "bmm") and value.operands[0].shape[-1] == 1


@rule("product", why="a convolution")
def _is_convolution(value: Value, graph: Graph) -> bool:
    return plain_name(value).startswith(("conv", "_conv"))


@rule("product", why=f"more than {MOST_TOKENS} tokens: the library's GEMM is faster")
def _has_many_tokens(value: Value, graph: Graph) -> bool:
    return linear_residual.OP.slower(tokens=_tokens(value)) is not None


@rule(
    "product",
    why=f"one of two products multiplied with each other, for more than {MOST_GATED_TOKENS} "
    "tokens: the library's GEMM is faster",
)
def _is_gated_for_many(value: Value, graph: Graph) -> bool:
    if linear_activation.OP.slower(tokens=_tokens(value), weights=2) is None:
        return False
    read = behind(value, graph)
    read_once = len(read.ends) == 1 and not read.returned and not read.added
    return read_once and read.gated and graph.kind(read.ends[0]) == "product"


@rule("product", why=f"fewer than {LEAST_COLUMNS} rows or columns of a weight")
def _is_narrow(value: Value, graph: Graph) -> bool:
    gemm = match_gemm(value)
    if gemm is None:
        return False
    passed = _passed(value, graph)
    read = (v for reader in _users(passed, graph) for v in reader.operands if v.value in passed)
    # The heads of a projection are slices of its columns, too, but they are not parts of an MLP.
    parts = (v for v in read if v.shape and v.shape[:-1] == value.shape[:-1])
    sizes = (*gemm.weight.shape, *(view.shape[-1] for view in parts))
    return any(isinstance(size, int) and size < LEAST_COLUMNS for size in sizes)


@rule(
    "product",
    why="the graph returns it: it is a head, or a graph break separates it from its readers",
)
def _is_returned(value: Value, graph: Graph) -> bool:
    read = behind(value, graph)
    return read.returned and not read.added and all(_only_counts(v, graph) for v in read.ends)


def _only_counts(value: Value, graph: Graph) -> bool:
    """Whether a value is a choice or a softmax that no product reads, so that it chooses no
    experts."""
    read = behind(value, graph)
    return graph.kind(value) in ("top-k", "softmax") and not any(
        graph.kind(v) == "product" for v in read.ends
    )


@rule("product", why="no activation, residual sum or cache write reads it: a product alone")
def _stands_alone(value: Value, graph: Graph) -> bool:
    if match_gemm(value) is None:
        return False
    read = behind(value, graph)
    writes = [v for v in read.ends if graph.kind(v) == "write" and not is_of_no_interest(v, graph)]
    return not (read.activated or read.added or writes)


@rule("product", why="a part of a convolution, or of the state of a recurrence")
def _feeds_state(value: Value, graph: Graph) -> bool:
    ends = behind(value, graph).ends
    if any(_is_convolution(v, graph) for v in ends if graph.kind(v) == "product"):
        return True
    if any(_keeps_state(v, graph) for v in ends if graph.kind(v) == "write"):
        return True
    return bool(ends) and all(graph.kind(v) == "product" and _feeds_state(v, graph) for v in ends)


@rule(
    "product",
    why="a product with one matrix for each entry of a batch, and no other such product next to it",
)
def _is_lone_of_a_batch(value: Value, graph: Graph) -> bool:
    """Whether a product has one matrix for each entry of a batch, the model stores all these
    matrices in one tensor, and no other such product feeds or reads the product."""
    held = [v for v in graph.weights(value) if v.value.node in graph.own]
    if named_product(value) is None or match_gemm(value) is not None or len(held) != 1:
        return False
    beside = [v for v in behind(value, graph).ends if graph.kind(v) == "product"]
    beside += _products_before(value, graph)
    return not any(graph.weights(v) and match_gemm(v) is None for v in beside)


def _products_before(value: Value, graph: Graph) -> list[Value]:
    """Returns the products from which a value is computed by operations that are not points."""

    def passes(source: Value) -> bool:
        return source is value or graph.kind(source) is None

    sources = upstream(value, len(graph.flow.values), passes)
    return [v for v in sources if v is not value and graph.kind(v) == "product"]


def _readers(value: Value, graph: Graph) -> list[Value]:
    """Returns the readers of a product. The search passes through casts and through arithmetic with
    numbers or the model's tensors (a bias, scales)."""
    passed = _passed(value, graph)
    return [v for v in _users(passed, graph) if v not in passed]


def _passed(value: Value, graph: Graph) -> list[Value]:
    """Returns a product, and the values computed from it by casts and by arithmetic with numbers or
    stored tensors."""

    def passes(reader: Value) -> bool:
        others = [v for v in reader.operands if graph.origin(v.value) != "own"]
        return reader.op == "cast" or (reader.op in _BY_NUMBER and len(others) == 1)

    return graph.flow.downstream(value, None, passes)


_BY_NUMBER = frozenset({"aten.add", "aten.mul", "aten.div", "aten.clamp"})


# The largest number of values in an activation that is written out as arithmetic.
_SPELLED = 8


@rule("product", why="the activation that reads it is one that no op has")
def _has_other_activation(value: Value, graph: Graph) -> bool:
    acted, known = _activations_of(value, graph)
    return bool(acted) and not known


@rule("product", why="the activation that reads it stays in a wider dtype than an op's result")
def _is_activated_wide(value: Value, graph: Graph) -> bool:
    acted, known = _activations_of(value, graph)
    return bool(acted) and all(v.dtype.itemsize > value.dtype.itemsize for v in known)


def _activations_of(value: Value, graph: Graph) -> tuple[list[Value], list[Value]]:
    """Returns the activations that read a product, and the values computed from them that are
    activations of our ops."""
    flow, passed = graph.flow, _passed(value, graph)
    acted = [reader for reader in _readers(value, graph) if _is_activation(reader, flow)]
    made = (v for reader in acted for v in flow.downstream(reader, _SPELLED))
    return acted, [v for v in dict.fromkeys(made) if _is_known_activation(v, passed, graph)]


def _is_known_activation(value: Value, passed: Sequence[Value], graph: Graph) -> bool:
    """Whether a value is an activation that our ops have, applied to a product. If there is a gate,
    the gate must be a product as well."""
    found = match_activation(value.whole)
    if found is None or found.name not in ACTIVATIONS or found.limit:
        return False
    entering = [view.value for view in (found.gate, found.up) if view is not None]
    return any(v in passed for v in entering) and all(_is_of_a_product(v, graph) for v in entering)


def _is_of_a_product(value: Value, graph: Graph) -> bool:
    """Whether a value is a product with a weight, apart from casts and arithmetic with numbers or
    stored tensors."""
    for _ in range(_SPELLED):
        if graph.kind(value) == "product":
            return bool(graph.weights(value))
        made = [view.value for view in value.operands if graph.origin(view.value) == "given"]
        if len(made) != 1 or value.op not in (*_BY_NUMBER, "cast"):
            return False
        (value,) = made
    return False


_EXTREMES = frozenset({"aten.maximum", "aten.minimum", "aten.mean", "aten.std", "aten.var"})


@rule(
    "product",
    why="its result is compared with a statistic or an extreme of itself before any other use",
)
def _is_compared(value: Value, graph: Graph) -> bool:
    """Whether the graph computes extremes or statistics of a product, and all other readers of the
    product add these to it or subtract them from it."""
    readers, made = _readers(value, graph), _made_of(value, graph)
    rest = [r for r in readers if r.op not in _EXTREMES and r.op not in SHAPED_LIKE]
    return any(r.op in _EXTREMES for r in readers) and all(
        r.op in ("aten.add", "aten.sub") and not _adds_other(r, made, graph) for r in rest
    )


@rule("product", why="a gate: another tensor multiplies its result")
def _is_weighed(value: Value, graph: Graph) -> bool:
    passed, readers = _passed(value, graph), _readers(value, graph)
    gates = [
        r
        for r in readers
        if r.op == "aten.mul"
        and len(r.operands) == 2
        and not _is_known_activation(r, passed, graph)
        and not _scales_codes(r, value, graph)
    ]
    others = [reader for reader in readers if reader not in gates]
    if not gates or not others:
        return bool(gates)
    made = _made_of(value, graph)
    by_others = all(any(v.value not in made for v in gate.operands) for gate in gates)
    return by_others and all(
        _is_of_a_norm(r, graph.flow)
        or (graph.kind(r) == "product" and _is_of_two_activations(r, graph))
        for r in others
    )


def _scales_codes(gate: Value, product: Value, graph: Graph) -> bool:
    """Whether a product with codes is multiplied by a tensor with fewer elements. This tensor is
    then the scale of the codes."""
    if not any(holds_codes(view.value) for view in graph.weights(product)):
        return False
    least = min(_count(view.shape) for view in gate.operands)
    return least < _count(gate.shape)


def _count(shape: Sequence[Any]) -> int:
    """Returns the number of elements of a shape; a symbolic size counts as one."""
    return math.prod(size for size in shape if isinstance(size, int))


def _made_of(value: Value, graph: Graph) -> set[Value]:
    """Returns a value and the values computed from it, up to the next points."""
    return set(graph.flow.downstream(value, None, lambda v: graph.kind(v) is None))


@rule("product", why="other operations than the sum read its result, too")
def _is_read_elsewhere(value: Value, graph: Graph) -> bool:
    readers = _readers(value, graph)
    sums = [reader for reader in readers if reader.op == "aten.add"]
    returned = any(v in graph.flow.output_values for v in _passed(value, graph))
    return bool(sums) and (len(readers) > 1 or returned)


# --- softmaxes ------------------------------------------------------------------------------------


@rule(
    "softmax",
    why="attention without a mask and with as many key heads as query heads: "
    "PyTorch's own kernel is enough",
)
def _gains_nothing(value: Value, graph: Graph) -> bool:
    sketch = sketch_of(value)
    return sketch is not None and not gains(sketch)


@rule(
    "softmax",
    why="a softmax of a linear's result, by which tensors are mixed: these are not "
    "scores of queries with keys",
)
def _mixes(value: Value, graph: Graph) -> bool:
    """Whether the softmax of a linear's result only multiplies other tensors. Such a softmax is
    neither over scores of queries with keys, nor over experts to choose from."""
    scores = _products_before(value, graph)
    if not scores or not all(graph.weights(v) and match_gemm(v) is not None for v in scores):
        return False
    alone = {value}

    def is_made_of_it(user: Value) -> bool:
        others = [v.value for v in user.operands if graph.origin(v.value) == "given"]
        if graph.kind(user) is None and alone.issuperset(others):
            alone.add(user)
        return user in alone

    weights = graph.flow.downstream(value, None, is_made_of_it)
    read = [user for user in _users(weights, graph) if user not in alone]
    return bool(read) and all(_is_mixed(user, alone, graph) for user in read)


def _is_mixed(value: Value, weights: set[Value], graph: Graph) -> bool:
    """Whether a value is a tensor multiplied by weights, and this tensor is not the result of an
    expert."""
    mixed = [view.value for view in value.operands if view.value not in weights]
    multiplied = value.op == "aten.mul" or (
        graph.kind(value) == "product" and _is_of_two_activations(value, graph)
    )
    return multiplied and not any(_is_of_a_product(v, graph) for v in mixed)


@rule("softmax", why="the graph returns it: probabilities from which tokens are sampled")
def _leads_nowhere(value: Value, graph: Graph) -> bool:
    read = behind(value, graph)
    return read.returned and not read.ends


# --- writes ---------------------------------------------------------------------------------------


@rule("write", why="a single number, or integers: a count of tokens, or positions")
def _counts(value: Value, graph: Graph) -> bool:
    assert value.store is not None
    return effects.product(value.store.memory.shape) == 1 or not value.dtype.is_floating_point


# Writes of one number. torch's operators of these names have no pointwise tag.
_FILLS = frozenset({"setitem", "zero", "fill"})


@rule(
    "write",
    why="an input, or a slice of it, is changed element by element: no rows are put into places",
)
def _changes_elements(value: Value, graph: Graph) -> bool:
    """Whether a write is arithmetic on the memory's own values, or fills the memory with a number.
    No product contributes to such a write, except through earlier writes to the memory."""
    store, flow = value.store, graph.flow
    assert store is not None
    name = store.kind.removeprefix("_foreach_").removesuffix("_")
    if (
        store.index
        or store.source is not None
        or not (name in _FILLS or torch.Tag.pointwise in _compat.aten_tags(name))
    ):
        return False
    others = (v.value for v in value.operands)
    return not any(
        v.projected and flow.memory_of.get(flow.home(v)) is not store.memory for v in others
    )


@rule("write", why="a lookup rescales a table (max_norm): no rows are put there")
def _rescales(value: Value, graph: Graph) -> bool:
    assert value.store is not None
    return value.store.kind in ("embedding", "embedding_renorm_")


@rule("write", why="the state of a convolution or of a recurrence is replaced")
def _keeps_state(value: Value, graph: Graph) -> bool:
    assert value.store is not None
    return replaces_state(value.store)


@rule("write", why="a value that one step leaves for the next: one token replaces the whole memory")
def _leaves_for_next(value: Value, graph: Graph) -> bool:
    """Whether one token replaces the whole of a memory.

    Either the step computes several tokens and stores one of them; or the step has only one token,
    the memory has no dimension for tokens, and the graph has read the memory before. The new
    contents must not depend on the old contents. Therefore a memory of several tokens that moves on
    by one token does not count: its new contents include old tokens.
    """
    store = value.store
    assert store is not None
    source, memory = store.source, store.memory
    if source is None or store.index or continues(source.value, memory):
        return False
    if effects.product(store.target.shape) != effects.product(memory.shape):
        return False
    made_of = source.value.operands if graph.kind(source.value) == "product" else ()
    rows = [view for view in made_of if graph.origin(view.value) == "given"]
    if any(map(_is_one_of_many, (source, *rows))):
        return True
    read = any(place < value.position for place, _ in graph.flow.read.get(memory, ()))
    return read and len(memory.shape) < len(source.value.shape)


def _is_one_of_many(view: View) -> bool:
    """Whether a view selects one index of some longer dimension."""
    axes = {atom.axis for dim in view.effect.dims for atom in dim}
    return any(n != 1 and axis not in axes for axis, n in enumerate(view.value.shape))


@rule("write", why="this graph does not compute the written values")
def _comes_from_outside(value: Value, graph: Graph) -> bool:
    assert value.store is not None
    source = value.store.source
    return source is not None and not source.value.projected


# --- choices --------------------------------------------------------------------------------------


@rule("top-k", why="the sorted values are integers: an order of rows")
def _orders_integers(value: Value, graph: Graph) -> bool:
    given = value.operands[0].value.dtype if value.operands else value.dtype
    return not given.is_floating_point


@rule("top-k", why=f"a choice among more than {MOST_EXPERTS} entries: words or tokens, not experts")
def _is_of_words(value: Value, graph: Graph) -> bool:
    given = value.operands[0]
    width = given.shape[-1] if given.shape else 1
    return isinstance(width, int) and width > MOST_EXPERTS


@rule(
    "top-k",
    why="a choice of the keys that an attention reads, by separate scores: a sparse indexer",
)
def _chooses_keys(value: Value, graph: Graph) -> bool:
    """Whether scores of two activations are compared, and only attentions read the choice."""
    read = [behind(v, graph) for v in graph.flow.values_at([value.node])]
    ends = [end for one in read for end in one.ends]
    attended = bool(ends) and all(graph.kind(v) == "softmax" for v in ends)
    made_of_two = any(_is_of_two_activations(v, graph) for v in _products_before(value, graph))
    return made_of_two and attended and not any(one.returned for one in read)


@rule("top-k", why="the scores compare tokens with each other, so the choice is not among experts")
def _compares_tokens(value: Value, graph: Graph) -> bool:
    """Whether the compared scores are products of one activation with itself."""
    scores = _products_before(value, graph)
    sides = [{view.value for view in v.operands if len(view.shape) > 1} for v in scores]
    alone = all(len(side) == 1 for side in sides)
    return bool(scores) and alone and all(_is_of_two_activations(v, graph) for v in scores)


rule("top-k", why="the graph returns it: tokens are sampled from it")(_leads_nowhere)


def is_of_no_interest(value: Value, graph: Graph) -> str:
    """Returns why a point is of no interest. The result is empty if no rule applies to the
    point."""
    kind = graph.kind(value)
    if kind == "product" and is_unknown(value) and not _is_fused_already(value, graph):
        return ""  # the value's meaning is only guessed
    rules = (rule for rule in RULES if rule.kind == kind and rule.holds(value, graph))
    rule = next(rules, None)
    return "" if rule is None else rule.why
