"""Calls of a registered op: the checks of each call, and what is remembered about earlier calls."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.ops.checks import ArgumentError, debug_values
from tilewright.ops.fused_op import FusedOp, Lowering, OpCallable, device_of, loaded
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.peers import RankFailedError
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.recording import CallKeys, Key, tensor_devices
from tilewright.ops.runtime.replay import repeat

log = logging.getLogger("tilewright")

#: The largest number of things that are remembered for each op and device type. Each set of
#: metadata counts as one thing, and each call that can be repeated counts as one.
MAX_REMEMBERED = 4096


@dataclass
class _Kind:
    """A record of the calls that have the same metadata.

    Attributes:
        devices: The devices of the tensors of such a call.
        lowering: The lowering that computes such calls.
        repeats: Maps the key of the addresses of a call to a function that repeats the call. The
            value is None if there has been only one call at these addresses.
    """

    devices: list[torch.device]
    lowering: Lowering
    repeats: dict[Key, OpCallable | None] = field(default_factory=dict)


class Calls:
    """The calls of an op on one device type, and what is remembered about them.

    A call with new metadata is checked completely, and its lowering is chosen. For later calls with
    this metadata, only the values are checked, and the same lowering is used. On CUDA, the third
    call at the same addresses, and each later one, only repeats the launches of the earlier calls.
    """

    def __init__(self, op: FusedOp, device_type: str) -> None:
        self.op, self.device_type = op, device_type
        self._lists = _list_names(op)
        # On the CPU, values are checked at every call, so no call is repeated. Keys do not contain
        # the addresses of tensors in lists, so ops that have lists of tensors as arguments are
        # never repeated either.
        self._emits = device_type == "cuda" and any(way.build for way in op.lowerings)
        self._repeats = self._emits and not any(map(_holds_tensors, op.kinds.values()))
        self._moving = frozenset(n for n, name in enumerate(op.parameters) if name in op.moving)
        self._keys = CallKeys(op.kinds, op.moving)
        self._kinds: dict[Key, _Kind] = {}
        self._remembered = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self.device_type):
            # Autocast would round intermediate results that the reference and libraries compute in
            # float32.
            with torch.autocast(self.device_type, enabled=False):
                return self(*args, **kwargs)
        # A decode step calls the ops of all layers in the same way as the previous step, mostly at
        # the same addresses.
        metadata, addresses = self._keys(args, kwargs)
        kind = self._kinds.get(metadata)
        again = None if kind is None else kind.repeats.get(addresses)
        if kind and again and not debug_values() and not _needs_grad(args, kwargs):
            try:
                return again(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # the full path below names the error, or falls back to the reference
                kind.repeats.pop(addresses, None)
        arguments = self.op.arguments(*args, **kwargs)
        devices = tensor_devices(args, kwargs)
        if kind is None or kind.devices != devices:
            # Lists are looked at only here, because calls with known metadata lack no list.
            if _lacks_list(self._lists, arguments):
                whole, options = self.op.split(_with_lists(self._lists, arguments))
                return self(*whole, **options)
            kind = _Kind(devices, self._chosen(arguments))
            self._remember(self._kinds, metadata, kind)
        if _records_backward() or forward_ad._current_level >= 0:
            _check_needs_no_grad(self.op, arguments)
        self.op.validate_values(arguments)
        seen = addresses in kind.repeats
        result, again = self._performed(kind, arguments, args, kwargs, seen)
        if self._repeats and (again is not None or not seen):
            self._remember(kind.repeats, addresses, again)
        return result

    def _chosen(self, arguments: Any) -> Lowering:
        """Checks a call, and returns the lowering for it and for all other calls with its metadata.
        Raises ArgumentError."""
        _check_tensors_given(self.op, arguments)
        self.op.validate(arguments)
        target = machine_of(device_of(arguments)).target if self._emits else None
        return self.op.choose(self.device_type, arguments, target).lowering

    def _performed(
        self, kind: _Kind, arguments: Any, args: Any, kwargs: Any, seen: bool
    ) -> tuple[Any, OpCallable | None]:
        """Returns (result, function that repeats the call). The function is None if the call cannot
        be repeated.

        seen: whether such a call was made before. Only then is the repeat prepared.

        If the lowering cannot be built or launched, the reference computes this call and later
        calls, and a message is logged. A lowering only stores to its outputs and never reads them,
        so the reference overwrites whatever a failed attempt has written. These errors are raised
        instead: any error if TILEWRIGHT_DEBUG=1 is set, out of memory, bad values, and errors in a
        call that other ranks of a group wait for.
        """
        lowering = kind.lowering
        try:
            if lowering.build is None:
                return loaded(lowering.entry)(*args, **kwargs), None
            machine = machine_of(device_of(arguments))
            steps = loaded(lowering.build)(arguments, machine.target)
            program = drive(steps, machine, keep=None if seen else False)
            again = repeat(program, args, kwargs, machine, self._moving)
            return program.outcome.result, again
        except (ArgumentError, RankFailedError, torch.OutOfMemoryError):
            raise
        except Exception:
            if debug_values() or lowering.name == "reference":
                raise
            log.exception("%s: %s failed; using the reference", self.op.name, lowering.name)
            kind.lowering = self.op.reference_lowering()
        return self.op.reference(arguments), None

    def _remember(self, known: dict[Key, Any], key: Key, value: Any) -> None:
        self._remembered += 1
        if self._remembered > MAX_REMEMBERED:
            self._kinds.clear()
            self._remembered = 0
        known[key] = value


def _holds_tensors(kind: str) -> bool:
    """Whether an argument type, in PyTorch's notation, is a list of tensors."""
    return "List" in kind and "Tensor" in kind


def _list_names(op: FusedOp) -> tuple[str, ...]:
    return tuple(name for name, kind in op.kinds.items() if kind.startswith("List["))


def _lacks_list(names: tuple[str, ...], arguments: Any) -> bool:
    """Whether a list is None. AOTInductor's runtime passes None for an empty list."""
    return None in [getattr(arguments, name) for name in names]


def _with_lists(names: tuple[str, ...], arguments: Any) -> Any:
    empty = {name: () for name in names if getattr(arguments, name) is None}
    return replace(arguments, **empty)


def _check_tensors_given(op: FusedOp, arguments: Any) -> None:
    """Checks that no required tensor is None. PyTorch's dispatcher accepts None for a required
    tensor, and treats it as an undefined tensor."""
    for name, kind in op.kinds.items():
        if kind == "Tensor" and getattr(arguments, name) is None:
            raise ArgumentError(op.name, name, "a tensor", None)


def _records_backward() -> bool:
    """Whether autograd records operations. In inference mode it does not, whatever the grad mode
    is."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _needs_grad(args: Any, kwargs: Any) -> bool:
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return False
    return any(
        isinstance(value, torch.Tensor) and _differentiated(value)
        for value in (*args, *kwargs.values())
    )


def _differentiated(tensor: torch.Tensor) -> bool:
    """Whether the caller requests a derivative with respect to the tensor, in backward or forward
    mode."""
    if tensor.requires_grad and _records_backward():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _check_needs_no_grad(op: FusedOp, arguments: Any) -> None:
    """Raises ArgumentError if a tensor needs a gradient. A fused op records nothing for a backward
    pass, so the gradient would be lost silently."""
    for name in op.kinds:
        value = getattr(arguments, name)
        if isinstance(value, torch.Tensor) and _differentiated(value):
            raise _inference_only(op, name, value.requires_grad)


def _inference_only(op: FusedOp, name: str, backward: bool) -> ArgumentError:
    if backward:
        expected = "no tensor that requires grad while grad mode is on, because the op is for "
        expected += "inference only (call it under torch.no_grad())"
        return ArgumentError(op.name, name, expected, "a tensor that requires grad")
    expected = (
        "no dual tensor of forward-mode differentiation, because the op is for inference only"
    )
    return ArgumentError(op.name, name, expected, "a tensor with a tangent")


def transformed(op: FusedOp) -> OpCallable:
    """Returns the op's implementation for the transforms of torch.func. PyTorch's dispatcher calls
    it before the op's other implementations.

    Without this implementation, grad, vjp and jvp would return zeros, because the op records
    nothing for them. If a transform wraps a tensor but does not differentiate it, the tensor is
    unwrapped and passed on. Calls outside of a transform are not affected.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    keys = keys.add(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
    names = tuple(op.kinds)

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
    """Returns the op's implementation that runs before autograd. If a traced call writes nothing,
    the implementation calls the op `without_writes` instead.

    The functionalisation of torch.export and AOTInductor would misinterpret a call that writes
    nothing: functionalisation expects several results, but such a call returns one.
    """
    names, written = tuple(op.kinds), op.mutated
    other = getattr(torch.ops, op.namespace)

    def run(*args: Any, **kwargs: Any) -> Any:
        traced = torch._C._len_torch_dispatch_stack() > 0
        given = dict(zip(names, args, strict=False)) | kwargs if traced else {}
        if traced and all(given.get(name) is None for name in written):
            try:
                return getattr(other, op.without_writes)(*args, **kwargs)
            except ArgumentError as error:  # name the op that the user called
                raise ArgumentError(
                    op.name, error.argument, error.expected, error.actual
                ) from error
        with torch._C._AutoDispatchBelowAutograd():
            return op.torch_op(*args, **kwargs)

    return run


def _unwrapped(op: FusedOp, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of torch.func. Raises ArgumentError if the tensor is
    differentiated or batched."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            expected = (
                "a tensor that torch.vmap has not batched, because the op has no rule for vmap "
            )
            expected += "(pass the whole batch to the op, or call the op in a loop)"
            raise ArgumentError(op.name, name, expected, "a batched tensor")
        if not functorch.is_gradtrackingtensor(tensor):
            break  # torch.func.functionalize needs no unwrapping
        if _differentiated(tensor):
            raise _inference_only(op, name, tensor.requires_grad)
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def fake_implementation(op: FusedOp) -> OpCallable:
    lists = _list_names(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = _with_lists(lists, op.arguments(*args, **kwargs))
        _check_tensors_given(op, arguments)
        op.validate(arguments)
        # The check is done here because Dynamo calls the fake implementation before AOTAutograd
        # runs. AOTAutograd would treat the results as constants, without an error. An exported
        # program is for inference, even if its parameters require gradients.
        if _records_backward() and not torch.compiler.is_exporting():
            _check_needs_no_grad(op, arguments)
        return op.faked(arguments)

    return run
