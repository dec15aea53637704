"""Keeps declarations of what libraries' operators compute, and spells out the operators' calls.

    declare("somebodys::op", meaning)

`meaning` is a function in plain PyTorch. While patterns look at the graph, the graph has the
operations of `meaning` in place of each call of the operator. A call stays as it was written if no
pattern took a part of it (`spelled.py`). Operators of quantisation libraries are declared by
default (`compiler/quantised/operators.py`).
"""

from __future__ import annotations

import fnmatch
import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tilewright.codegen.names import did_you_mean
from tilewright.compiler import _compat
from tilewright.compiler._compat import trials
from tilewright.compiler._compat.autocast import autocast_at_devices
from tilewright.compiler.dataflow.access import access_of, call_key, given
from tilewright.compiler.dataflow.spelling import name_of, shape_of
from tilewright.compiler.quantised.operators import OPERATORS, UnfitError
from tilewright.compiler.rewrite.spelled import SpelledOut, stand_in
from tilewright.compiler.rewrite.strides import is_dense, packed_as, same_steps
from tilewright.compiler.rewrite.writer import Writer
from tilewright.patterns.language import Miss, Stage

Meaning = Callable[..., Any]

#: The declarations by `namespace::name`. A name may hold the wildcards of fnmatch.
_DECLARED: dict[str, Meaning] = {}
# The hub registers the operators of a kernel's build as `_<kernel>_<hash>::name`, or with the name
# of the backend before the hash.
_BUILD = r"_{}(_cuda|_rocm|_xpu)?_[0-9a-z]{{6,}}(_dirty)?"
# Functions that allocate a tensor without filling it.
_ROOMS = frozenset({torch.empty, torch.empty_strided, torch.empty_like})
#: The start of the notes about declarations.
NOTE = "declare"
# Namespaces whose operators cannot be declared, because patterns know these operators.
_KNOWN = ("aten", "prim", "prims", "tilewright")


def declare(op: Any, meaning: Meaning) -> None:
    """Declares what an operator of a library computes, so that patterns see this computation in its
    place.

    op: the operator (an `OpOverload`, an `OpOverloadPacket`, or the result of
        `torch.library.custom_op`), or its name `"namespace::name"`, which stands for all its
        overloads. A name may hold the wildcards of fnmatch. The name of a hub kernel's operator,
        `"kernel::name"`, stands for all builds `_kernel_<hash>::name` and
        `_kernel_<hash>_dirty::name`, too. A declaration by full name takes precedence over a
        declaration by a wildcard. A declaration of the user takes precedence over the default ones,
        which are for operators of quantisation libraries.
    meaning: a function in plain PyTorch whose parameters have the names of the operator's
        arguments. It returns the same values as the operator, and writes in place the arguments
        that the operator's schema marks as written. It is traced with fake tensors, once for each
        layout of a call's arguments.

    The operator may be registered later. If no operator has the name when a model is compiled, the
    report has a note.

    Raises ValueError for a name without a namespace, for an operator of PyTorch, for a meaning that
    does not take the arguments of the operator, and for an operator that already has another
    declaration.
    """
    name = _name(op)
    if not callable(meaning):
        raise ValueError(f"meaning: expected a function, got {meaning!r}")
    for overload in _registered(name):
        if fault := _fault_of_names(meaning, overload):
            raise ValueError(fault)
    known = _DECLARED.setdefault(name, meaning)
    if known is not meaning:
        raise ValueError(
            f"op: {name!r} is declared as {_described(known)}, got {_described(meaning)}; "
            "undeclare it first"
        )


def undeclare(op: Any) -> None:
    """Removes the declaration of an operator; raises KeyError if there is none."""
    del _DECLARED[_name(op)]


def _name(op: Any) -> str:
    found = op if isinstance(op, str) else _compat.name_of_operator(op)
    if not isinstance(found, str) or not re.fullmatch(r"[^:]+::[^:]+", found):
        raise ValueError(f'op: expected an operator or its name "namespace::name", got {op!r}')
    if found.split("::")[0] in _KNOWN:
        raise ValueError(
            f"op: expected an operator of a library, got {found!r}, which tilewright knows"
        )
    return found


def _registered(name: str) -> list[Any]:
    """Returns the overloads that torch has registered under a name."""
    namespace, _, rest = name.partition("::")
    called, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), called, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, one) for one in packet.overloads() if overload in ("", one)]


def _described(meaning: Meaning | None) -> str:
    module, name = (getattr(meaning, a, "") for a in ("__module__", "__qualname__"))
    return f"{module}.{name}" if name else repr(meaning)


def _fault_of_names(meaning: Meaning, overload: Any) -> str:
    """Returns how the parameters of a meaning differ from the arguments of an operator. Returns ""
    if they agree."""
    names = [spec.name for spec in overload._schema.arguments]
    try:
        parameters = inspect.signature(meaning)
    except (TypeError, ValueError):  # a function that is written in C
        return ""
    try:
        parameters.bind(**dict.fromkeys(names))
    except TypeError as error:
        expected = ", ".join(names)
        return (
            f"meaning: expected a function of ({expected}), the arguments of {overload}; got "
            f"{_described(meaning)}{parameters}: {error}"
        )
    return ""


def _meaning_of(overload: Any) -> Meaning | None:
    """Returns the declaration of an operator, or None if it has none. The user's declarations are
    searched before the default ones. In each, the full name is searched first, and then the name of
    a hub kernel or a wildcard."""
    namespace, _, name = overload._schema.name.partition("::")
    if namespace in _KNOWN:
        return None
    names = (f"{name}.{overload._overloadname}", name)
    by_user = _among(_DECLARED, namespace, names)
    return by_user or _among(OPERATORS, namespace, names)


def _among(declared: Mapping[str, Meaning], namespace: str, names: Sequence[str]) -> Meaning | None:
    for whole in (f"{namespace}::{one}" for one in names):
        if whole in declared:
            return declared[whole]
    found = (meaning for key, meaning in declared.items() if _stands_for(key, namespace, names))
    return next(found, None)


def _stands_for(key: str, namespace: str, names: Sequence[str]) -> bool:
    """Whether a declared name is that of a hub kernel, or has wildcards, and stands for an
    operator."""
    space, _, called = key.partition("::")
    build = called in names and re.fullmatch(_BUILD.format(re.escape(space)), namespace)
    return bool(build) or any(fnmatch.fnmatchcase(f"{namespace}::{one}", key) for one in names)


def _split(registered: str) -> tuple[str, tuple[str, str]]:
    """Splits the registered name of an overload into its namespace and the two names that a
    declaration may use: with the overload, and without it."""
    namespace, _, rest = registered.partition("::")
    called, _, overload = rest.partition(".")
    return namespace, (f"{called}.{overload or 'default'}", called)


def notes_of_unregistered() -> tuple[str, ...]:
    """Returns a note for each of the user's declarations that holds for no registered operator."""
    if not _DECLARED:
        return ()
    operators = {_split(name) for name in _compat.names_of_operators()}
    operators = {one for one in operators if one[0] not in _KNOWN}
    known = {f"{namespace}::{names[1]}" for namespace, names in operators}
    return tuple(
        f"{NOTE}: no operator {key!r} is registered, so its declaration has no effect"
        f"{did_you_mean(key, known)}"
        for key in _DECLARED
        if key not in known and not any(_stands_for(key, *one) for one in operators)
    )


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """The trace of a meaning.

    inputs: the placeholders, one for each node that the call reads.
    outputs: the values that the meaning returns, in order.
    copies: for each input that the meaning overwrites as a whole, the `copy_` that overwrites it.
        Inputs that another node reads or writes are left out.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    copies: Mapping[fx.Node, fx.Node]


class DeclaredCalls:
    """The calls of declared operators in one graph. Calls with equal layouts share a trace."""

    def __init__(self) -> None:
        self._traces: Traces = {}

    def takes(self, target: Any) -> bool:
        overload = _overload(target)
        return overload is not None and _meaning_of(overload) is not None

    def spell(self, call: fx.Node, write: Writer) -> SpelledOut | None:
        """Returns the spelled-out call. Returns None for a call that does nothing."""
        results = _results(call)
        if not results and not access_of(call):
            return None
        _require_plain(call)
        trace = trace_of(call, self._traces, partial(_meaning_traced, call))
        held = call.meta.get("example_value")
        require_same_layout(trace, list(held) if isinstance(held, (tuple, list)) else [held])
        made = [(trace.outputs[at], result) for at, result in results]
        rooms = _rooms(call, trace)
        made += [(trace.copies[taken].args[1], room) for taken, room in rooms.items()]
        known = copied(call.all_input_nodes, trace, [end for end, _ in made], rooms, write)
        _require_same_writes(call, write.added, rooms.values())
        inputs = [node for node in call.all_input_nodes if node not in rooms.values()]
        ends: list[fx.Node] = []
        for end, result in made:
            ends.append(end_of(known[end], result, [*inputs, *ends], write))
        return stand_in(write, [result for _, result in made], ends) if write.added else None

    def refused(self, call: fx.Node, error: Exception) -> Miss:
        unfit = unfit_of(error)
        meaning = _described(_meaning_of(_overload(call.target)))
        message = f"{name_of(call)} is declared as {meaning}, {unfit}"
        return Miss("declare", "DECLARED_FORM", Stage.ANCHORED, message, (call,), unfit.hint)


Traces = dict[Any, Trace | UnfitError]


def trace_of(call: fx.Node, known: Traces, make: Callable[[], Trace]) -> Trace:
    """Returns the trace of a call. Calls with equal layouts share one.

    `known` has the traces that were made so far. Raises UnfitError if `make` raises it for a call
    of this layout.
    """
    key = call_key(call)
    if key not in known:
        try:
            known[key] = make()
        except _compat.DynamoError:
            raise
        except Exception as error:
            known[key] = unfit_of(error)
    found = known[key]
    if isinstance(found, UnfitError):
        raise UnfitError(str(found), found.hint)
    return found


def unfit_of(error: Exception) -> UnfitError:
    what = next(iter(str(error).strip().splitlines()), "")
    said = f"which raises {type(error).__name__}: {what}"
    return error if isinstance(error, UnfitError) else UnfitError(said)


def _overload(target: Any) -> Any:
    """Returns the operator overload that is the target of a call. Returns None for any other
    target."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    return target if isinstance(target, torch._ops.OpOverload) else None


def _results(call: fx.Node) -> list[tuple[int, fx.Node]]:
    """Returns (position among the results, node) of each result of a call that is used."""
    held = call.meta.get("example_value")
    if isinstance(held, torch.Tensor):
        return [(0, call)] if call.users else []
    if held is not None and not isinstance(held, (tuple, list)):
        raise UnfitError("and returns other values than tensors")
    parts = [user for user in call.users if user.target is operator.getitem]
    if len(parts) != len(call.users) or not all(isinstance(p.args[1], int) for p in parts):
        raise UnfitError("and its results are used as a whole")
    return [(p.args[1], p) for p in parts if p.users]  # type: ignore[misc]


def _require_plain(call: fx.Node) -> None:
    """Raises UnfitError unless a call has only plain, dense tensors and runs without autocast."""
    tensors = _compat.tensors_of(call, *call.all_input_nodes)
    if not given(call):
        raise UnfitError("and is given no tensor")
    for tensor in tensors:
        if _compat.is_subclass(tensor) or _compat.is_functorch_wrapper(tensor):
            raise UnfitError(f"for plain tensors; it is called with a {type(tensor).__name__}")
        if not _compat.storage_keys(tensor):
            raise UnfitError("for dense tensors; it is called with another layout")
    if autocast_at_devices(call, {tensor.device.type for tensor in tensors}):
        raise UnfitError("and called under autocast, which computes its meaning in other dtypes")


def _meaning_traced(call: fx.Node) -> Trace:
    overload = _overload(call.target)
    meaning: Any = _meaning_of(overload)
    if fault := _fault_of_names(meaning, overload):
        raise UnfitError(f"and takes other arguments. {fault}")
    sources = call.all_input_nodes
    arguments: dict[str, Any] = {}
    for at, spec in enumerate(overload._schema.arguments):
        default = call.kwargs.get(spec.name, spec.default_value)
        arguments[spec.name] = call.args[at] if at < len(call.args) else default
    held = [_compat.detached(source.meta["example_value"]) for source in sources]

    def compute(*values: Any) -> Any:
        known = dict(zip(sources, values, strict=True))
        return meaning(**{name: fx.node.map_arg(a, known.get) for name, a in arguments.items()})

    return traced(compute, held)


def traced(compute: Callable[..., Any], held: Sequence[Any]) -> Trace:
    """Returns the ATen calls that `compute(*held)` makes. Raises UnfitError if these calls cannot
    become a part of the graph."""
    graph = _compat.aten_graph(compute, held, pre_dispatch=True)
    _restore_literals(graph)
    for node in graph.nodes:
        if why := _obstacle(node):
            raise UnfitError(why)
    (returned,) = graph.output_node().args
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return Trace(graph, tuple(graph.find_nodes(op="placeholder")), outputs, _copies(graph))


def _copies(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    found = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        room, source = node.args[:2]
        tensors = [one.meta["val"] for one in (room, source)]
        alike = tensors[0].dtype == tensors[1].dtype and tensors[0].shape == tensors[1].shape
        if room.op == "placeholder" and [*room.users] == [node] and not node.users and alike:
            found[room] = node
    return found


def _restore_literals(graph: fx.Graph) -> None:
    """Restores calls of `torch.tensor` on numbers. The trace has only the results of these
    calls."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.lift_fresh_copy.default):
        held: Any = node.args[0]
        if held.op != "get_attr":
            continue
        numbers = getattr(graph.owning_module, held.target)
        node.target, node.args = torch.tensor, (numbers.tolist(),)
        node.kwargs = {"dtype": numbers.dtype, "device": numbers.device}
        for user in [u for u in node.users if u.target is torch.ops.aten.detach_.default]:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        graph.erase_node(held)


def _obstacle(node: fx.Node) -> str:
    """Returns why a node of a trace cannot become a part of the graph. Returns "" if it can."""
    if node.op == "get_attr":
        return "which reads a tensor that is not an argument of the operator"
    if node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"which calls {target}"
    if torch.Tag.inplace_view in getattr(target, "tags", ()):
        return f"which changes the shape or strides of a tensor in place, by {target}"
    if any(map(_compat.is_unbacked, _compat.tensors_in(node.meta.get("val")))):
        return f"in which {target} returns a tensor whose size only the data decides"
    return ""


def require_same_layout(trace: Trace, expected: Sequence[Any]) -> None:
    """Raises UnfitError if a meaning returns tensors of other dtypes, shapes or devices than the
    operator."""
    made = [out.meta["val"] if isinstance(out, fx.Node) else out for out in trace.outputs]
    of_both = [[*map(_laid_out, results)] for results in (made, expected)]
    if of_both[0] != of_both[1]:
        got, wanted = (", ".join(map(str, texts)) for texts in of_both)
        raise UnfitError(f"which returns {got}; the operator returns {wanted}")


def _laid_out(held: Any) -> str:
    if not isinstance(held, torch.Tensor):
        return str(held)
    dtype = str(held.dtype).removeprefix("torch.")
    return f"{dtype}{[*shape_of(held)]} on {held.device}"


def _rooms(call: fx.Node, trace: Trace) -> dict[fx.Node, fx.Node]:
    """Returns the tensors that the graph allocates only for this call to fill. The result maps the
    input of the trace to the tensor. The nodes after the call may read a new tensor instead."""
    given = dict(zip(trace.inputs, call.all_input_nodes, strict=True))
    return {taken: given[taken] for taken in trace.copies if _is_room(given[taken], call)}


def _is_room(node: fx.Node, call: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _ROOMS:
        return False
    return all(user is call or call < user for user in node.users)


def copied(
    sources: Sequence[fx.Node],
    trace: Trace,
    used: Sequence[fx.Node],
    rooms: Collection[fx.Node],
    write: Writer,
) -> dict[fx.Node, Any]:
    """Adds the nodes of a trace that the writes of the trace and the used outputs need.

    `sources` are the graph's nodes for the inputs of the trace, in order. `rooms` are the inputs
    whose copies are left out.
    """
    known: dict[fx.Node, Any] = dict(zip(trace.inputs, sources, strict=True))
    needed = needed_for(trace.graph, used, {trace.copies[room] for room in rooms})
    for node in trace.graph.nodes:
        if node in needed and node not in known:
            known[node] = write.again(node, known)
    return known


def needed_for(
    graph: fx.Graph, used: Sequence[fx.Node], left_out: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Returns the nodes from which the writes of a trace, and the nodes in `used`, are computed."""
    needed = set(used)
    for node in reversed(graph.nodes):
        if node not in left_out and (node in needed or _writes(node)):
            needed |= {node, *node.all_input_nodes}
    return needed


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and trials.writes(node.target)


def _require_same_writes(
    call: fx.Node, added: Sequence[fx.Node], rooms: Collection[fx.Node]
) -> None:
    """Raises UnfitError if a meaning writes other arguments than the operator's schema states."""
    own = {key for tensor in given(call) for key in _compat.storage_keys(tensor)}
    own -= set(_compat.storages_of(*rooms))
    says, does = (
        own & {k for n in nodes for t in access_of(n).written for k in _compat.storage_keys(t)}
        for nodes in ([call], added)
    )
    if says != does:
        names = [
            ", ".join(n.name for n in call.all_input_nodes if set(_compat.storages_of(n)) & keys)
            for keys in (does, says)
        ]
        wrote, expected = (text or "nothing" for text in names)
        raise UnfitError(f"which writes {wrote}; the operator's schema says {expected}")


# --- results --------------------------------------------------------------------------------------


def end_of(made: fx.Node, result: fx.Node, others: Sequence[fx.Node], write: Writer) -> fx.Node:
    """Returns the node to read in place of a result.

    This node has the strides of the operator's result, and it shares memory with the inputs and
    other results of the call exactly where the operator's result does.
    """
    held, wanted = made.meta["example_value"], result.meta["example_value"]
    taken = set(_compat.storages_of(*others))
    if not taken.isdisjoint(_compat.storage_keys(wanted)):
        if not _compat.holds_in_place(held, wanted):
            raise UnfitError(
                "which returns new memory where the operator returns memory of an argument"
            )
        return write.call(torch.ops.aten.alias.default, made)
    if not taken.isdisjoint(_compat.storage_keys(held)):
        made = write.call(torch.ops.aten.clone.default, made)
    if same_steps(made.meta["example_value"], wanted):
        return made
    if not is_dense(wanted):
        raise UnfitError(f"and returns strides {wanted.stride()}, which are not dense")
    return packed_as(wanted, made, write.call)
