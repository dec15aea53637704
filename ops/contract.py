"""The registry of fused ops: turns a declaration into `torch.ops.<namespace>.<name>`.

An op is one frozen record: arguments, fake implementation, checks, reference, lowerings, sample
inputs and tolerances. Tests, benchmarks and verification are written once, for all ops. A user's
own op is registered in the same way, from any file:

    register(FusedOp(name="my_op", arguments=MyArguments, ...))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

import torch

from tilewright.ops import calls
from tilewright.ops.checks import ArgumentError, debug_values
from tilewright.ops.fused_op import Choice, FusedOp, Lowering, LoweringReport, emitted_kernel
from tilewright.ops.schema import ordered_fields
from tilewright.ops.tolerance import EXACT, ROUNDING, Tolerance, rounded_once

__all__ = [
    "EXACT",
    "ROUNDING",
    "ArgumentError",
    "Choice",
    "FusedOp",
    "Lowering",
    "LoweringReport",
    "OpConflictError",
    "Tolerance",
    "all_ops",
    "debug_values",
    "emitted_kernel",
    "get_op",
    "is_ours",
    "register",
    "rounded_once",
]


class OpConflictError(RuntimeError):
    """Raised when another op is already registered with the same name."""


_registry: dict[str, FusedOp] = {}
# A torch Library removes its definitions when it is garbage collected. This dict keeps it alive.
_libraries: dict[str, torch.library.Library] = {}


def register(op: FusedOp) -> FusedOp:
    """Defines `torch.ops.<namespace>.<name>` with the declared schema, for CPU, CUDA and Meta.

    Registering the same op again changes nothing. Raises OpConflictError if another op has this
    name, and ValueError if the fields of the arguments record are not the arguments of the schema.
    """
    name = op.qualified_name
    known = _registry.get(name)
    if known is not None:
        if _identity(known) != _identity(op):
            raise OpConflictError(
                f"{name} is already registered by {_where(known)}; {_where(op)} is another op: "
                "give it another name or namespace"
            )
        return known
    if _defined_elsewhere(op):
        raise OpConflictError(f"{name} is already defined in torch.ops, not through tilewright")
    _check_arguments(op)
    library = _libraries.get(op.namespace)
    if library is None:
        library = _libraries[op.namespace] = torch.library.Library(op.namespace, "FRAGMENT")
    # Strides determine the cache's geometry, so Inductor must pass the tensors unchanged.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(op.declaration, tags=tags)
    for device_type in ("cpu", "cuda"):  # calling a bound method is faster than calling an object
        library.impl(op.name, calls.Calls(op, device_type).__call__, device_type.upper())
    library.impl(op.name, calls.transformed(op), "FuncTorchDynamicLayerFrontMode")
    if op.without_writes:
        library.impl(op.name, calls.told_apart(op), "Autograd")
    torch.library.register_fake(name, calls.fake_implementation(op), lib=library)
    _registry[name] = op
    return op


def get_op(name: str) -> FusedOp:
    """Returns the op with the name `name` or `namespace::name`. Raises KeyError, whose message
    lists the registered ops, if there is no such op."""
    qualified = name if "::" in name else f"tilewright::{name}"
    if qualified not in _registry:
        raise KeyError(f"no fused op {qualified!r}; registered: {', '.join(sorted(_registry))}")
    return _registry[qualified]


def is_ours(called: torch._ops.OpOverload) -> bool:
    """Whether the called overload belongs to a registered op."""
    return called._schema.name in _registry


def all_ops() -> Iterator[FusedOp]:
    """Yields every registered op, sorted by name."""
    return iter([_registry[name] for name in sorted(_registry)])


def _defined_elsewhere(op: FusedOp) -> bool:
    return bool(torch._C._dispatch_has_kernel(op.qualified_name))


def _identity(op: FusedOp) -> tuple[Any, ...]:
    code = (op.validate, op.validate_values, op.fake or op.validate, op.reference)
    return (op.declaration, tuple((f.__module__, f.__qualname__) for f in code))


def _where(op: FusedOp) -> str:
    return f"{op.reference.__module__}.{op.reference.__qualname__}"


def _default(argument: Any) -> Any:
    """Returns the default of a schema argument in the form in which a dataclass has it: a list
    becomes a tuple."""
    if not argument.has_default_value():
        return MISSING
    value = argument.default_value
    return tuple(value) if isinstance(value, list) else value


def _check_arguments(op: FusedOp) -> None:
    declared = [(a.name, a.kwarg_only, _default(a)) for a in op.schema_arguments]
    written = [(f.name, f.kw_only, f.default) for f in ordered_fields(op.arguments)]
    if written != declared:
        raise ValueError(
            f"{op.qualified_name}: the fields of {op.arguments.__qualname__} {written} are not the "
            f"arguments of its schema {declared}"
        )
    _check_moving(op)


def _check_moving(op: FusedOp) -> None:
    names = [name for name, keyword in op.parameters.items() if not keyword]
    most = 1 + next((n for n, name in enumerate(names) if op.kinds[name] != "Tensor"), len(names))
    if not op.moving <= set(names[:most]) or (op.moving and op.mutated):
        raise ValueError(
            f"{op.qualified_name}: moving: expected positional arguments up to the first that is "
            f"not a required tensor, or none if the op writes an argument; got {set(op.moving)}"
        )
