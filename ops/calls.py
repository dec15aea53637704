"""How a registered op is called: what is checked of each call, and what is remembered of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.ops.checks import ArgumentError, debug_values
from tilewright.ops.fused_op import FusedOp, Lowering, OpCallable, device_of, loaded
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.peers import RankFailedError
from tilewright.ops.runtime.program import Machine, drive
from tilewright.ops.runtime.recording import address_key
from tilewright.ops.runtime.replay import repeat

log = logging.getLogger("tilewright")

#: Accepted argument metadata remembered per op and device, each with its lowering.
MAX_REMEMBERED = 4096


def implementation(op: FusedOp, device_type: str) -> OpCallable:
    names = tuple(field.name for field in fields(op.arguments))
    found = attrgetter(*names)  # of one name no tuple
    values_of = found if len(names) > 1 else lambda arguments: (found(arguments),)
    lists = _list_names(op)
    entries: dict[Any, OpCallable] = {}
    repeats: dict[Any, OpCallable | None] = {}  # None: seen once
    # On the CPU values are checked at every call. A key has no addresses of tensors in lists.
    repeatable = device_type == "cuda" and any(low.repeatable or low.build for low in op.lowerings)
    repeatable = repeatable and not _takes_tensor_lists(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(device_type):
            # It would round what the reference and the libraries compute in float32.
            with torch.autocast(device_type, enabled=False):
                return run(*args, **kwargs)
        # A decode step calls every layer's op as the step before did, mostly at its addresses.
        place = address_key(args, kwargs) if repeatable else None
        again = repeats.get(place)
        if again is not None and not debug_values() and not _needs_grad(args, kwargs):
            try:
                return again(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the whole way says what is wrong, or goes on by the reference
                repeats.pop(place, None)
        seen = place in repeats
        result, again = whole(args, kwargs, seen)
        if repeatable and (again is not None or not seen):
            _remember(repeats, place, again)
        return result

    def whole(args: Any, kwargs: Any, seen: bool) -> tuple[Any, OpCallable | None]:
        arguments = op.arguments(*args, **kwargs)
        key = _metadata(values_of(arguments))
        entry = entries.get(key)
        if entry is None:
            if _lacks_list(lists, arguments):  # never remembered: no other call looks for it
                return whole(*op.split(_with_lists(lists, arguments)), seen)
            _check_tensors_given(op, arguments)
            op.validate(arguments)
            emits = device_type == "cuda" and any(lowering.build for lowering in op.lowerings)
            target = _machine(arguments).target if emits else None
            entry = _guarded(op, op.choose(device_type, arguments, target).lowering)
            _remember(entries, key, entry)
        if _records_backward() or forward_ad._current_level >= 0:
            _check_needs_no_grad(op, arguments)
        op.validate_values(arguments)
        return entry(arguments, args, kwargs, seen)

    return run


def _takes_tensor_lists(op: FusedOp) -> bool:
    return any("List" in kind and "Tensor" in kind for kind in _kinds(op).values())


def _kinds(op: FusedOp) -> dict[str, str]:
    """PyTorch's name for the type of each argument: "Tensor", "Optional[Tensor]", "List[int]"."""
    schema = torch._C.parse_schema(op.declaration)
    return {argument.name: str(argument.type) for argument in schema.arguments}


def _list_names(op: FusedOp) -> tuple[str, ...]:
    return tuple(name for name, kind in _kinds(op).items() if kind.startswith("List["))


def _lacks_list(names: tuple[str, ...], arguments: Any) -> bool:
    """Whether a list is None: what AOTInductor's runtime hands over for an empty one."""
    return None in [getattr(arguments, name) for name in names]


def _with_lists(names: tuple[str, ...], arguments: Any) -> Any:
    empty = {name: () for name in names if getattr(arguments, name) is None}
    return replace(arguments, **empty)


def _check_tensors_given(op: FusedOp, arguments: Any) -> None:
    """Torch lets None pass for a Tensor, as an undefined one."""
    for name, kind in _kinds(op).items():
        if kind == "Tensor" and getattr(arguments, name) is None:
            raise ArgumentError(op.name, name, "a tensor", None)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= MAX_REMEMBERED:
        known.clear()
    known[key] = value


def _records_backward() -> bool:
    """Whether autograd records: in inference mode it does not, whatever the grad mode is."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _needs_grad(args: Any, kwargs: Any) -> bool:
    if not _records_backward() and forward_ad._current_level < 0:
        return False
    return any(
        isinstance(value, torch.Tensor) and _differentiated(value)
        for value in (*args, *kwargs.values())
    )


def _differentiated(tensor: torch.Tensor) -> bool:
    """Whether a derivative with respect to the tensor, backward or forward, is asked for."""
    if tensor.requires_grad and _records_backward():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _called(
    lowering: Lowering, arguments: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seen: bool
) -> tuple[Any, OpCallable | None]:
    """The result, and what makes the same call again. arguments: the record of args and kwargs.
    seen: whether such a call was made before; it is not prepared to be made again otherwise."""
    if lowering.build is not None:
        machine = _machine(arguments)
        steps = loaded(lowering.build)(arguments, machine.target)
        program = drive(steps, machine, keep=None if seen else False)
        return program.outcome.result, repeat(program, args, kwargs, machine)
    if lowering.repeatable is None:
        return loaded(lowering.entry)(*args, **kwargs), None
    return loaded(lowering.repeatable)(*args, **kwargs)


def _machine(arguments: Any) -> Machine:
    """What launches for a call."""
    return machine_of(device_of(arguments))


def _guarded(op: FusedOp, lowering: Lowering) -> OpCallable:
    """The lowering; where it cannot be built or launched, the reference from then on, and a log.

    The writes are pure stores, so what a failed attempt may have written is written again.
    `TILEWRIGHT_DEBUG=1` lets the failure through, and so do running out of memory, bad values, and
    what the other ranks of a group wait for.
    """
    failed: list[Exception] = []

    def run(arguments: Any, args: Any, kwargs: Any, seen: bool) -> Any:
        if not failed:
            try:
                return _called(lowering, arguments, args, kwargs, seen)
            except (ArgumentError, RankFailedError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if debug_values() or lowering.name == "reference":
                    raise
                failed.append(error)
                log.exception("%s: %s failed; using the reference", op.name, lowering.name)
        return op.reference(arguments), None

    return run


def _check_needs_no_grad(op: FusedOp, arguments: Any) -> None:
    """A fused op records nothing for a backward pass: say so rather than lose a gradient."""
    for field in fields(op.arguments):
        value = getattr(arguments, field.name)
        if isinstance(value, torch.Tensor) and _differentiated(value):
            raise _inference_only(op, field.name, value.requires_grad)


def _inference_only(op: FusedOp, name: str, backward: bool) -> ArgumentError:
    if backward:
        expected = "no tensor that requires grad while grad mode is on, as the op is for "
        expected += "inference only (call it under torch.no_grad())"
        return ArgumentError(op.name, name, expected, "one that does")
    expected = "no dual tensor of forward-mode differentiation, as the op is for inference only"
    return ArgumentError(op.name, name, expected, "one with a tangent")


def transformed(op: FusedOp) -> OpCallable:
    """The op under a transform of torch.func, which PyTorch's dispatcher asks before all else.

    Without it grad, vjp and jvp would give zeros, as nothing is recorded for them. A tensor that
    a transform wraps but does not differentiate is passed on bare. Costs nothing elsewhere.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    keys = keys.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
    names = tuple(_kinds(op))

    def bare(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [bare(name, item) for item in value]
        return _unwrapped(op, name, value) if isinstance(value, torch.Tensor) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple([bare(name, value) for name, value in zip(names, args, strict=False)])
        kwargs = {name: bare(name, value) for name, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op.torch_op(*args, **kwargs)

    return run


def told_apart(op: FusedOp) -> OpCallable:
    """The op before autograd, which hands a traced call that writes nothing to another op.

    Functionalisation, of torch.export and AOTInductor, reads such a call as one of several results
    and returns one.
    """
    names, written = tuple(_kinds(op)), op.mutated
    other = getattr(torch.ops, op.namespace)

    def run(*args: Any, **kwargs: Any) -> Any:
        traced = torch._C._len_torch_dispatch_stack() > 0
        given = dict(zip(names, args, strict=False)) | kwargs if traced else {}
        if traced and all(given.get(name) is None for name in written):
            try:
                return getattr(other, op.without_writes)(*args, **kwargs)
            except ArgumentError as error:  # names the op that was called
                raise ArgumentError(
                    op.name, error.argument, error.expected, error.actual
                ) from error
        with torch._C._AutoDispatchBelowAutograd():
            return op.torch_op(*args, **kwargs)

    return run


def _unwrapped(op: FusedOp, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What the wrappers of torch.func hold. Raises ArgumentError for one that is differentiated
    or batched."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            expected = "no tensor of torch.vmap, for which the op has no rule (give it the batch "
            expected += "whole, or call it in a loop)"
            raise ArgumentError(op.name, name, expected, "a batched one")
        if not functorch.is_gradtrackingtensor(tensor):
            break  # torch.func.functionalize, which goes on by itself
        if _differentiated(tensor):
            raise _inference_only(op, name, tensor.requires_grad)
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _metadata(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that `validate` and `choose` look at, as a key."""
    return tuple(
        [
            (value.shape, value.stride(), value.dtype, value.device)
            if isinstance(value, torch.Tensor)
            else _metadata(tuple(value))
            if isinstance(value, list)
            else value
            for value in values
        ]
    )


def fake_implementation(op: FusedOp) -> OpCallable:
    lists = _list_names(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = _with_lists(lists, op.arguments(*args, **kwargs))
        _check_tensors_given(op, arguments)
        op.validate(arguments)
        # Dynamo asks here, before AOTAutograd would take the results for constants. What is
        # exported is for inference, whatever its parameters say.
        if _records_backward() and not torch.compiler.is_exporting():
            _check_needs_no_grad(op, arguments)
        return op.fake(arguments)

    return run
