"""Tables that reduce the many ways to write an operation to ATen's names, one table for each kind
of operation.

Dynamo keeps `F.linear`, `x @ w.t()`, `.view`, `torch.chunk`, `operator.setitem` and so on as the
user wrote them. The tables here say what a call selects (its layout), how it splits a tensor,
whether it only copies, or which ATen operation it is. The module `writes` reads the calls that
write in place. If a target is in no table, `aten_names` traces it by itself. A target that remains
unknown is opaque.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.effects import Effect, InexpressibleError, Size


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Returns the table that a text describes, such as `add=add iadd=add_`."""
    return dict(pair.split("=") for pair in text.split())


# ATen's names for functions of `operator`. In the first two rows both names are the same.
_OPERATORS: dict[Any, str] = {
    getattr(operator, name): aten
    for name, aten in _pairs(
        """
        add=add sub=sub mul=mul neg=neg pow=pow matmul=matmul getitem=getitem setitem=setitem
        lt=lt le=le gt=gt ge=ge eq=eq ne=ne
        truediv=div floordiv=floor_divide mod=remainder
        and_=bitwise_and or_=bitwise_or invert=bitwise_not
        rshift=bitwise_right_shift lshift=bitwise_left_shift
        iadd=add_ isub=sub_ imul=mul_ itruediv=div_
        """
    ).items()
}

_RENAMED = _pairs(
    """
    true_divide=div divide=div multiply=mul subtract=sub negative=neg clip=clamp clip_=clamp_
    grouped_mm=_grouped_mm concat=cat concatenate=cat
    swapaxes=transpose swapdims=transpose
    __getitem__=getitem __setitem__=setitem __add__=add __radd__=add __mul__=mul __rmul__=mul
    __sub__=sub __matmul__=matmul __truediv__=div __and__=bitwise_and __or__=bitwise_or
    __xor__=bitwise_xor __lshift__=bitwise_left_shift __rshift__=bitwise_right_shift
    __iadd__=add_ __imul__=mul_ __isub__=sub_ __itruediv__=div_
    """
)

# Calls whose values do not matter: profiling, autograd and autocast regions, shape queries.
NOISE = _names(
    """
    _log_api_usage_once _set_grad_enabled _enter_autocast _exit_autocast _assert_tensor_metadata
    sym_size sym_sum sym_max sym_min size dim numel stride is_contiguous _check _check_is_size
    """
)

#: A key in the `meta` of nodes that the dataflow view ignores, because other nodes compute the same
#: values in their place.
PASSED_OVER = "tilewright_passed_over"

# Calls whose result equals the first operand, element for element. The storages of the fake tensors
# tell whether the two share memory.
IDENTITY = _names("contiguous clone detach detach_ alias lift_fresh_copy requires_grad_ positive")

# Calls that are the identity if the dtype stays the same, and a cast if the dtype changes.
CASTS = _names("to _to_copy float half bfloat16 double type type_as long int bool cuda cpu")

# Calls that put the wrappers of vmap, grad and jvp around tensors, or take these wrappers off.
TRANSFORMS = _names(
    """
    _add_batch_dim _remove_batch_dim _wrap_for_grad _unwrap_for_grad _make_dual _unpack_dual
    """
)

DROPOUT = _names("dropout dropout1d dropout2d alpha_dropout feature_dropout")


# Operators of other libraries that equal one of ATen's.
_ELSEWHERE = {"transformers::grouped_mm_fallback": "_grouped_mm"}

# Plain ATen operations, by name. Their arguments stay as they are.
PLAIN = _names(
    """
    abs add addcmul all amax amin any arange argmax argsort baddbmm bitwise_and bitwise_not einsum
    bitwise_or bitwise_right_shift bitwise_left_shift bmm ceil clamp cos cumsum div embedding
    empty empty_like eq erf exp exp2 floor floor_divide full full_like gather ge gelu gt
    group_norm histc index_put index_select isin le layer_norm log logical_and logical_not
    logical_or logsumexp lt masked_fill matmul max maximum mean min minimum mm mul
    native_layer_norm ne neg new_empty new_full new_ones new_zeros nonzero norm one_hot ones
    ones_like outer pad pow rand reciprocal relu remainder repeat_kv rms_norm round rsqrt rsub
    scaled_dot_product_attention scatter scatter_add searchsorted sigmoid sign silu sin softmax
    softplus sort sqrt square std sub sum tanh topk tril triu tril_indices var view_as_complex
    view_as_real where zeros zeros_like _grouped_mm _scaled_mm polar roll hardtanh index_copy
    _scaled_mm_v2
    index_add log_softmax tensor scalar_tensor diff
    """
)

# Operations that store the result of arithmetic in place.
IN_PLACE_ARITHMETIC = _names(
    """
    add_ sub_ mul_ div_ pow_ neg_ clamp_ relu_ sigmoid_ silu_
    exp_ masked_fill_ floor_divide_ bitwise_and_ bitwise_or_ clamp_min_ clamp_max_ remainder_
    rsqrt_ sqrt_ tanh_ addcmul_
    """
)


def name_of(node: fx.Node) -> str:
    """Returns the short ATen name of a node's target, or `ns::name` for an operator of another
    library."""
    target = node.target
    if isinstance(target, str):
        return _RENAMED.get(target, target)
    if target in _OPERATORS:
        return _OPERATORS[target]
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if isinstance(packet, torch._ops.OpOverloadPacket):
        namespace, _, name = packet._qualified_op_name.partition("::")
        whole = f"{namespace}::{name}"
        return _RENAMED.get(name, name) if namespace == "aten" else _ELSEWHERE.get(whole, whole)
    name = getattr(target, "__name__", str(target))
    return _RENAMED.get(name, name) if is_torch_function(target) else f"python::{name}"


def calls_of(graph: fx.Graph, names: Collection[str]) -> list[fx.Node]:
    """Returns the nodes of a graph whose :func:`name_of` is in `names`, in program order."""
    called = {node.target: node for node in graph.nodes}
    wanted = {target for target, node in called.items() if name_of(node) in names}
    return [node for node in graph.nodes if node.target in wanted] if wanted else []


def is_torch_function(target: Any) -> bool:
    """Whether a callable comes with torch or Python. The name of such a callable says what it
    does."""
    module = (
        getattr(target, "__module__", None) or type(getattr(target, "__self__", None)).__module__
    )
    return module is None or module.split(".")[0] in ("torch", "builtins", "_operator")


# --- layout -------------------------------------------------------------------------------------


class Call(Protocol):
    """The arguments of a call, as an fx.Node has them."""

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


def argument(node: Call, position: int, keyword: str, default: Any = None) -> Any:
    """Returns an argument given by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(keyword, default)


def sizes_from(node: Call, position: int, keyword: str) -> list[Any]:
    """Returns sizes that are given as one sequence or as separate arguments."""
    first = argument(node, position, keyword)
    if isinstance(first, (tuple, list, torch.Size)):
        return list(first)
    return list(node.args[position:]) if first is None or len(node.args) > position else [first]


def _dim(index: Any, rank: int) -> int:
    if not isinstance(index, int):
        raise InexpressibleError("an argument of the graph gives a dimension")
    return index + rank if index < 0 else index


def _to_shape(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    return effects.regroup(effect, shape)


def _to_sizes(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    """Returns the effect, regrouped to the sizes that the call names. These sizes are more reliable
    than the shape of the result: torch may write a symbolic number in that shape as a quotient of
    sizes."""
    given = sizes_from(node, 1, "size" if "size" in node.kwargs else "shape")
    return effects.regroup(effect, _as_given(given, shape))


def _unflattened(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    given = argument(node, 2, "sizes")
    if not isinstance(given, (tuple, list)):
        given = sizes_from(node, 2, "sizes")
    dim = _dim(argument(node, 1, "dim"), len(effect.dims))
    inner = _as_given(given, shape[dim : dim + len(given)])
    return effects.regroup(effect, [*shape[:dim], *inner, *shape[dim + len(given) :]])


def _as_given(given: Sequence[Any], shape: Sequence[Size]) -> list[Size]:
    """Returns the sizes that a call gives, with the result's size in place of -1. If the call's
    sizes are unknown, returns the result's sizes."""
    numbers = [g.meta.get("example_value") if isinstance(g, fx.Node) else g for g in given]
    known = all(isinstance(n, (int, torch.SymInt)) for n in numbers)
    if not known or len(numbers) != len(shape):
        return list(shape)
    pairs = zip(map(size_of, numbers), shape, strict=True)
    return [length if size == -1 else size for size, length in pairs]


def _transpose(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    rank = len(effect.dims)
    if rank == 0:
        return effect  # PyTorch accepts dimensions 0 and -1 for a number
    order = list(range(rank))
    a = _dim(argument(node, 1, "dim0"), rank)
    b = _dim(argument(node, 2, "dim1"), rank)
    order[a], order[b] = order[b], order[a]
    return effects.permute(effect, order)


def _permute(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    rank = len(effect.dims)
    return effects.permute(effect, [_dim(d, rank) for d in sizes_from(node, 1, "dims")])


def _reverse_dims(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    return effects.permute(effect, range(len(effect.dims))[::-1])


def _unsqueeze(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    return effects.unsqueeze(effect, _dim(argument(node, 1, "dim"), len(effect.dims) + 1))


def _squeeze(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    given = argument(node, 1, "dim")
    rank = len(effect.dims)
    dims = range(rank) if given is None else [given] if isinstance(given, int) else given
    return effects.squeeze(effect, [_dim(d, rank) for d in dims])


def _expand(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    return effects.expand(effect, shape)


def _narrow(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    dim = _dim(argument(node, 1, "dim"), len(effect.dims))
    start = _offset(size_of(argument(node, 2, "start")), effect.shape[dim])
    return effects.narrow(effect, dim, start, shape[dim])


def _slice_tensor(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    dim = _dim(argument(node, 1, "dim", 0), len(effect.dims))
    item = slice(argument(node, 2, "start"), None, argument(node, 4, "step", 1))
    return _slice(effect, dim, item, shape[dim])


def _select(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    dim = _dim(argument(node, 1, "dim"), len(effect.dims))
    return effects.select(
        effect, dim, _offset(size_of(argument(node, 2, "index")), effect.shape[dim])
    )


def _repeat(effect: Effect, node: Call, shape: Sequence[Size]) -> Effect:
    times = [size_of(n) for n in sizes_from(node, 1, "repeats")]
    lengths = [1] * (len(times) - len(effect.dims)) + list(effect.shape)
    split = effects.reshape(effect, [n for length in lengths for n in (1, length)])
    wide = effects.expand(
        split, [n for t, length in zip(times, lengths, strict=True) for n in (t, length)]
    )
    return effects.reshape(wide, shape)


Rule = Callable[[Effect, Call, Sequence[Size]], Effect]

#: Calls that change a tensor's shape. For dense elements they return a view; for other elements
#: they may return a copy.
SHAPES = _names("view reshape view_as reshape_as flatten unflatten ravel _unsafe_view")

#: The rule for each layout operation. It computes the selection from the effect of the input, the
#: call and the shape of the result.
LAYOUT: dict[str, Rule] = {
    name: rule
    for rule, names in (
        (_to_shape, "view_as reshape_as flatten ravel"),
        (_to_sizes, "view reshape _unsafe_view"),
        (_unflattened, "unflatten"),
        (_transpose, "transpose"),
        (_reverse_dims, "t T"),
        (_permute, "permute"),
        (_unsqueeze, "unsqueeze"),
        (_squeeze, "squeeze"),
        (_expand, "expand expand_as broadcast_to"),
        (_narrow, "narrow"),
        (_slice_tensor, "slice"),
        (_select, "select"),
        (_repeat, "repeat"),
    )
    for name in names.split()
}


def selected(effect: Effect, name: str, call: Call, shape: Sequence[Size]) -> Effect:
    """Returns the effect of a call in IDENTITY or LAYOUT on a tensor with `effect`. `shape` is the
    shape of the result."""
    if name in IDENTITY or (not effect.dims and effects.product(shape) == 1):
        return effects.reshape(effect, shape)
    return LAYOUT[name](effect, call, shape)


class Parts:
    """The parts of a split, chunk, unbind or tensor_split, with their `shapes`. A part is computed
    only when it is asked for, because a tensor may have thousands."""

    def __init__(self, name: str, node: Call, shapes: Sequence[Sequence[Size]]) -> None:
        self._name = name
        self._dim = argument(node, 1 if name == "unbind" else 2, "dim", 0)
        self._shapes = shapes

    @cached_property
    def _starts(self) -> list[Size]:
        dim = _dim(self._dim, len(self._shapes[0]))
        return list(accumulate((shape[dim] for shape in self._shapes), initial=0))

    def select(self, effect: Effect, at: int) -> Effect:
        """Returns the effect of part `at`, for a tensor with `effect` that is split."""
        dim = _dim(self._dim, len(effect.dims))
        if self._name == "unbind":
            return effects.select(effect, dim, range(len(self._shapes))[at])
        return effects.narrow(effect, dim, self._starts[at], self._shapes[at][dim])


SPLITS = _names("split split_with_sizes chunk unbind unsafe_chunk unsafe_split tensor_split")

# Every name that the tables decide without a trial of the call. None of these calls writes (see
# `access`).
LISTED = (
    NOISE
    | IDENTITY
    | CASTS
    | DROPOUT
    | PLAIN
    | SPLITS
    | TRANSFORMS
    | frozenset(LAYOUT)
    | _names("linear addmm mm matmul cat hstack stack getitem getattr")
)


# --- sizes and basic indexing ---------------------------------------------------------------------


def size_of(item: Any) -> Size:
    """Returns an int, a SymInt or the node of one as a size."""
    if isinstance(item, fx.Node):
        item = item.meta["example_value"]
    if isinstance(item, torch.SymInt):
        expression = item.node.expr
        return int(expression) if expression.is_Integer else expression
    return int(item)


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """Returns the shape of a tensor, fake or not, as sizes."""
    return sizes(tensor.shape)


def sizes(numbers: Iterable[Any]) -> tuple[Size, ...]:
    """Returns ints and SymInts as sizes."""
    return tuple([n if type(n) is int else size_of(n) for n in numbers])


def _offset(index: Size, length: Size) -> Size:
    return index + length if isinstance(index, int) and index < 0 else index


def _end(index: Size, length: Size) -> Size:
    """Returns one end of a slice as an index from the front. An end before the first element
    becomes 0."""
    at = _offset(index, length)
    return max(at, 0) if isinstance(at, int) else at


def _slice(effect: Effect, dim: int, item: slice, length: Size | None = None) -> Effect:
    """Returns the effect with dimension `dim` sliced by `item`. `length` is the size of the result,
    if its shape is known."""
    size = effect.shape[dim]
    start = 0 if item.start is None else _end(size_of(item.start), size)
    step = 1 if item.step is None else size_of(item.step)
    if not isinstance(step, int):
        raise InexpressibleError("a slice has a symbolic step")
    if length is None:
        stop = size if item.stop is None else _end(size_of(item.stop), size)
        if all(isinstance(n, int) for n in (size, start, stop)):
            length = len(range(*slice(start, stop, step).indices(size)))
        elif step == 1:
            length = stop - start
        else:
            raise InexpressibleError("a slice with a step cuts a symbolic dimension")
    if isinstance(start, int) and isinstance(size, int):
        start = min(start, size)
    return effects.narrow(effect, dim, start, length, step)


def is_tensor_node(item: Any) -> bool:
    """Whether an argument is a node that holds a tensor."""
    return isinstance(item, fx.Node) and isinstance(item.meta.get("example_value"), torch.Tensor)


def index_effect(effect: Effect, index: Any) -> tuple[Effect, dict[int, fx.Node]]:
    """Returns the effect of the basic part of `x[index]`, and the index tensors by the dimensions
    of that part.

    Raises InexpressibleError if no effect expresses the index, for example if it has several lists
    of ints, or a mask given as Python values.
    """
    items = (
        list(index) if isinstance(index, (tuple, list)) and not _is_list_index(index) else [index]
    )
    consumed = sum(1 for i in items if i is not None and i is not Ellipsis)
    if Ellipsis in [i for i in items if not isinstance(i, fx.Node)]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(effect.dims) - consumed)
    else:
        items += [slice(None)] * (len(effect.dims) - consumed)
    tensors: dict[int, fx.Node] = {}
    lists = sum(isinstance(i, list) for i in items)
    if lists > 1 or (lists and any(is_tensor_node(i) for i in items)):
        raise InexpressibleError("an index list is combined with another index")
    dim = 0
    for item in items:
        effect, dim = _apply_item(effect, dim, item, tensors)
    return effect, tensors


def _is_list_index(index: Any) -> bool:
    return isinstance(index, list) and all(isinstance(i, int) for i in index)


class Rows:
    """A list of positions that no slice expresses. Rows at these positions are gathered, as by an
    index tensor."""

    def __init__(self, at: Sequence[int]) -> None:
        self.at = tuple(at)


def with_rows(index: Any) -> Any:
    """Returns the index with its only list of positions as :class:`Rows`. Returns None if the index
    has no such list, or if a slice expresses the list."""
    items = index if isinstance(index, tuple) else (index,)
    lists = [i for i in items if isinstance(i, list)]
    if len(lists) != 1 or any(is_tensor_node(i) for i in items):
        return None
    (at,) = lists
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in at):
        return None
    steps = {b - a for a, b in pairwise(at)}
    if len(steps) < 2 and all(step > 0 for step in steps):
        return None
    return tuple(Rows(i) if isinstance(i, list) else i for i in items)


def _apply_item(
    effect: Effect, dim: int, item: Any, tensors: dict[int, fx.Node]
) -> tuple[Effect, int]:
    if item is None:
        return effects.unsqueeze(effect, dim), dim + 1
    if isinstance(item, slice):
        return effect if item == slice(None) else _slice(effect, dim, item), dim + 1
    if is_tensor_node(item):
        tensors[dim] = item
        return effect, dim + 1
    if isinstance(item, Rows):
        tensors[dim] = item.at  # type: ignore[assignment]
        return effect, dim + 1
    if isinstance(item, list):
        return _positions(effect, dim, item), dim + 1
    if isinstance(item, bool):
        raise InexpressibleError("a Python bool is used as an index")
    return effects.select(effect, dim, _offset(size_of(item), effect.shape[dim])), dim


def _positions(effect: Effect, dim: int, item: list[Any]) -> Effect:
    """Returns the effect that selects a list of positions as a slice. The positions must ascend
    evenly."""
    if not item or not all(isinstance(i, int) and not isinstance(i, bool) for i in item):
        raise InexpressibleError("an index list holds other items than numbers")
    at = [_offset(i, effect.shape[dim]) for i in item]
    steps = {b - a for a, b in pairwise(at)}
    if not all(isinstance(i, int) for i in at) or len(steps) > 1 or any(s < 1 for s in steps):
        raise InexpressibleError("no slice expresses an index list")
    return effects.narrow(effect, dim, at[0], len(at), next(iter(steps), 1))
