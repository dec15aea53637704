"""What every fused op declares, and how a declaration becomes `torch.ops.<namespace>.<name>`.

An op is one frozen record: arguments, fake, validation, reference, lowerings, sample inputs and
tolerances, so that tests, benchmarks and verification are written once for all ops. A user's own
op registers as ours do, from one file anywhere:

    register(FusedOp(name="my_op", arguments=MyArguments, ...))
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target, get_target
from tilewright.ops.cache.read import CacheRead
from tilewright.ops.checks import ArgumentError
from tilewright.ops.checks import debug_values as debug_values
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.runtime.device import emits_for
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, Steps, drive
from tilewright.ops.runtime.recording import address_key
from tilewright.ops.runtime.replay import repeat
from tilewright.ops.schema import ordered_fields, schema_of

log = logging.getLogger("tilewright")

OpCallable = Callable[..., Any]

#: Accepted argument metadata remembered per op and device, each with its lowering.
MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class Lowering:
    """One way to compute an op.

    `build` takes the arguments record and the target, and generates the steps of a call
    (`ops.runtime.program`): from them the call is run, repeated and reported. Or `entry` is called
    exactly as the op is. Each may be "module:function", imported on first use.
    `unsupported` takes the arguments record: None, or why this lowering cannot take them.
    `repeatable`, where given, is called as `entry` is and gives (result, again): `again`, called so
    too, makes the same call once more while metadata and addresses of all tensors stay (whatever
    their contents), and is None where nothing can be remembered. It must hold no tensor. Used on
    CUDA alone.
    """

    name: str
    entry: OpCallable | str | None
    device_types: frozenset[str]
    unsupported: Callable[[Any], str | None]
    repeatable: OpCallable | str | None = None
    build: Callable[[Any, Target], Steps] | str | None = None

    def __post_init__(self) -> None:
        if (self.entry is None) == (self.build is None):
            raise ValueError(f"lowering {self.name!r}: expected one of entry and build")

    def call(
        self, arguments: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seen: bool = True
    ) -> tuple[Any, OpCallable | None]:
        """The result, and what makes the same call again. arguments: the record of args and
        kwargs. seen: whether such a call was made before; it is not prepared to be made again
        otherwise."""
        if self.build is not None:
            machine = machine_of(_device(arguments))
            steps = _loaded(self.build)(arguments, machine.target)
            program = drive(steps, machine, keep=None if seen else False)
            return program.outcome.result, repeat(program, args, kwargs, machine)
        if self.repeatable is None:
            return _loaded(self.entry)(*args, **kwargs), None
        return _loaded(self.repeatable)(*args, **kwargs)


def _anything(arguments: Any) -> str | None:
    return None


def emitted_kernel(
    build: Callable[[Any, Target], Steps] | str,
    unsupported: Callable[[Any], str | None] = _anything,
) -> Lowering:
    """The lowering whose steps launch emitted kernels; see Lowering."""
    return Lowering("emitted_kernel", None, frozenset({"cuda"}), unsupported, build=build)


@dataclass(frozen=True)
class Choice:
    """The lowering taken for one call, and why each one before it was not."""

    lowering: Lowering
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LoweringReport:
    """What a call at given shapes will run on a target: its name, why it, its emitted kernels."""

    name: str
    reason: str
    specs: tuple[KernelSpec, ...] = ()


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted error of an element: `relative * |exact| + of_rms * rms(exact) + absolute`.

    `relative` is the rounding to the output dtype, `absolute` that of its subnormal numbers where
    it has few others; `of_rms` is what accumulating in the op's compute precision costs where terms
    cancel. `exact` is the reference run in float64; of 8-bit floats, saturated as they are.
    """

    relative: float
    of_rms: float
    absolute: float = 0.0

    def problem(self, actual: torch.Tensor, exact: torch.Tensor) -> str | None:
        """None, or a sentence on the worst element."""
        if actual.shape != exact.shape:
            return f"shape {list(actual.shape)}, expected {list(exact.shape)}"
        if exact.numel() == 0:
            return None
        got, want = actual.detach().double().cpu(), exact.detach().double().cpu()
        if actual.dtype in FP8_DTYPES:
            limit = torch.finfo(actual.dtype).max
            want = want.clamp(-limit, limit)
        same = (got == want) | (got.isnan() & want.isnan())
        error = torch.where(same, 0.0, (got - want).abs().nan_to_num(nan=float("inf")))
        finite = torch.where(want.isfinite(), want, 0.0)
        allowed = self.relative * finite.abs() + self.of_rms * finite.square().mean().sqrt()
        allowed = allowed + self.absolute
        excess = error - allowed
        worst = int(excess.argmax())
        if float(excess.flatten()[worst]) <= 0:
            return None
        where = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
        got_value, want_value = float(got.flatten()[worst]), float(want.flatten()[worst])
        over = int((excess > 0).sum())
        return (
            f"{over} of {want.numel()} elements off; worst at {where}: {got_value!r}, exact "
            f"{want_value!r}, allowed error {float(allowed.flatten()[worst]):.3e}"
        )


EXACT = Tolerance(relative=0.0, of_rms=0.0)
#: `Tolerance.relative` of a result that is rounded once.
ROUNDING = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-49,
}


def rounded_once(*of_rms: float) -> dict[torch.dtype, Tolerance]:
    """Tolerances of results that are rounded once, with `of_rms` of each dtype of ROUNDING."""
    pairs = zip(ROUNDING.items(), of_rms, strict=False)
    return {dtype: Tolerance(relative, size) for (dtype, relative), size in pairs}


@dataclass(frozen=True)
class FusedOp:
    """Everything there is to know about one fused op.

    arguments: a dataclass whose fields are the op's arguments, typed as `ops.schema` says; the
        callables below take one instance of it.
    validate: checks metadata and nothing else, raises ArgumentError; also runs on fake tensors,
        adds no guard. Accepted metadata is remembered.
    validate_values: checks what only real memory shows (index values, aliases), before any write.
    fake: returns outputs with the right metadata.
    reference: defines the meaning; fp32 arithmetic (float64 for float64 inputs), rounded once.
    lowerings: tried in order; the reference is always the last resort.
    cases: settings that together reach every option of the op.
    sample_inputs: sample_inputs(case, device="cpu", seed=0) gives an instance of `arguments`.
    tolerances: per dtype of the op's result.
    error_model: in words, what `tolerances` follow from.
    plan: plan(arguments, target name) gives a LoweringReport, also for fake arguments and without a
        GPU; may be "module:function". None: what the lowering's `build` generates.
    returns: the result in the schema: "(Tensor, Tensor)", or "()" for None.
    schema: "(Tensor x, Tensor(a!) cache) -> Tensor", in place of what the fields and `returns` say,
        for what they cannot.
    cache_read: what a call reads of caches, by its arguments' metadata; None where it reads none.
    """

    name: str
    arguments: type[Any]
    validate: Callable[[Any], None]
    validate_values: Callable[[Any], None]
    fake: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    lowerings: tuple[Lowering, ...]
    cases: tuple[Any, ...]
    sample_inputs: Callable[..., Any]
    tolerances: Mapping[torch.dtype, Tolerance]
    error_model: str
    namespace: str = "tilewright"
    plan: Callable[[Any, str], LoweringReport] | str | None = None
    returns: str = "Tensor"
    schema: str | None = None
    cache_read: Callable[[Any], CacheRead] | None = None

    def plan_for(self, arguments: Any, target: str) -> LoweringReport:
        """The lowering these arguments (metadata suffices) get on `target`, and why."""
        choice = self.choose("cuda", arguments, get_target(target))
        if self.plan is None and choice.lowering.build is None and not choice.rejected:
            return LoweringReport("reference", "the op declares no kernel")
        if self.lowerings and choice.lowering.name == "reference":
            reasons = (f"{name}: {reason}" for name, reason in choice.rejected)
            return LoweringReport("reference", "; ".join(reasons))
        if self.plan is not None:
            return _loaded(self.plan)(arguments, target)
        planner = Planner(get_target(target))
        steps = _loaded(choice.lowering.build)(arguments, planner.target)
        program = drive(steps, planner, keep=True)
        outcome = program.outcome
        return LoweringReport(outcome.name, str(outcome.reason), program.specs)

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def torch_op(self) -> Any:
        """`torch.ops.<namespace>.<name>.default`; the op must be registered."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @cached_property
    def declaration(self) -> str:
        """Name and schema, as `torch.library.Library.define` takes them."""
        return self.name + (self.schema or schema_of(self.arguments, self.returns))

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments the schema declares as written."""
        schema = torch._C.parse_schema(self.declaration)
        return tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)

    def call(self, arguments: Any) -> Any:
        """Calls the registered op with an instance of `arguments`."""
        args, kwargs = self.split(arguments)
        return self.torch_op(*args, **kwargs)

    def split(self, arguments: Any) -> tuple[list[Any], dict[str, Any]]:
        """An instance of `arguments` as the positional and keyword arguments of the op."""
        positional = [f for f in fields(self.arguments) if not f.kw_only]
        keyword = [f for f in fields(self.arguments) if f.kw_only]
        return (
            [getattr(arguments, f.name) for f in positional],
            {f.name: getattr(arguments, f.name) for f in keyword},
        )

    def choose(self, device_type: str, arguments: Any, target: Target | None = None) -> Choice:
        """The first lowering that takes these arguments; metadata only, so fakes will do.

        target: of emitted kernels; None where it is not asked whether it has any for the op."""
        rejected: list[tuple[str, str]] = []
        for lowering in self.lowerings:
            reason: str | None = None
            if device_type not in lowering.device_types:
                reason = f"runs on {', '.join(sorted(lowering.device_types))} only"
            elif lowering.build is not None and target is not None:
                reason = self.target_obstacle(arguments, target)
            reason = reason or lowering.unsupported(arguments)
            if reason is None:
                return Choice(lowering, tuple(rejected))
            rejected.append((lowering.name, reason))
        return Choice(self.reference_lowering(), tuple(rejected))

    @property
    def family(self) -> str:
        """The folder of `ops/` that it is in; empty for an op from elsewhere."""
        package, _, rest = self.arguments.__module__.partition(".ops.")
        return rest.partition(".")[0] if package == "tilewright" else ""

    def target_obstacle(self, arguments: Any, target: Target) -> str | None:
        """Why a chip has no emitted kernels for a call; None where it may have some."""
        if self.family and self.family not in target.families:
            return f"its kernels are not audited for {target.name}"
        if target.has("fp8"):
            return None
        for name, tensor in _tensors(arguments):
            if tensor.dtype == torch.float8_e4m3fn:
                return f"{name} is of float8_e4m3fn, which {target.name} does not have"
        return None

    def has_lowering_on(self, device: torch.device) -> bool:
        """Whether a lowering is for `device`, whatever the arguments; an op that declares none is
        for every device. Meta tensors stand for those of the GPU that is planned for."""
        if not self.lowerings or device.type == "meta":
            return True
        return any(
            device.type in lowering.device_types and (lowering.build is None or emits_for(device))
            for lowering in self.lowerings
        )

    def reference_lowering(self) -> Lowering:
        """The op's meaning as its last resort."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.reference(self.arguments(*args, **kwargs))

        return Lowering("reference", run, frozenset({"cpu", "cuda"}), _anything)


class OpConflictError(RuntimeError):
    """A different op is already registered under this name."""


_registry: dict[str, FusedOp] = {}
# A torch Library takes its definitions with it when it is collected.
_libraries: dict[str, torch.library.Library] = {}


def register(op: FusedOp) -> FusedOp:
    """Defines `torch.ops.<namespace>.<name>` with the declared schema for CPU, CUDA and Meta.

    Registering the same op again changes nothing. Raises OpConflictError where another op has
    the name, ValueError where the schema and the arguments record disagree.
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
    # Strides carry the cache's geometry: Inductor must hand over the tensors as they are.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(op.declaration, tags=tags)
    library.impl(op.name, _implementation(op, "cpu"), "CPU")
    library.impl(op.name, _implementation(op, "cuda"), "CUDA")
    library.impl(op.name, _transformed(op), "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(name, _fake_implementation(op), lib=library)
    _registry[name] = op
    return op


def get_op(name: str) -> FusedOp:
    """The op called `name` or `namespace::name`. Raises KeyError listing the registered ones."""
    qualified = name if "::" in name else f"tilewright::{name}"
    if qualified not in _registry:
        raise KeyError(f"no fused op {qualified!r}; registered: {', '.join(sorted(_registry))}")
    return _registry[qualified]


def is_ours(called: torch._ops.OpOverload) -> bool:
    """Whether a registered op is called."""
    return called._schema.name in _registry


def all_ops() -> Iterator[FusedOp]:
    """Every registered op, by name."""
    return iter([_registry[name] for name in sorted(_registry)])


def _implementation(op: FusedOp, device_type: str) -> OpCallable:
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
            target = machine_of(_device(arguments)).target if emits else None
            entry = _guarded(op, op.choose(device_type, arguments, target).lowering)
            _remember(entries, key, entry)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
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


def _needs_grad(args: Any, kwargs: Any) -> bool:
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return False
    return any(
        isinstance(value, torch.Tensor) and _differentiated(value)
        for value in (*args, *kwargs.values())
    )


def _differentiated(tensor: torch.Tensor) -> bool:
    """Whether a derivative with respect to the tensor, backward or forward, is asked for."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _guarded(op: FusedOp, lowering: Lowering) -> OpCallable:
    """`lowering.call`; where it cannot be built or launched, the reference from then on, and a log.

    The writes are pure stores, so what a failed attempt may have written is written again.
    `TILEWRIGHT_DEBUG=1` lets the failure through, and so do running out of memory and bad values.
    """
    failed: list[Exception] = []

    def run(arguments: Any, args: Any, kwargs: Any, seen: bool) -> Any:
        if not failed:
            try:
                return lowering.call(arguments, args, kwargs, seen)
            except (ArgumentError, torch.OutOfMemoryError):
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


def _transformed(op: FusedOp) -> OpCallable:
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


def _fake_implementation(op: FusedOp) -> OpCallable:
    lists = _list_names(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = _with_lists(lists, op.arguments(*args, **kwargs))
        _check_tensors_given(op, arguments)
        op.validate(arguments)
        # Dynamo asks here, before AOTAutograd would take the results for constants. What is
        # exported is for inference, whatever its parameters say.
        if torch.is_grad_enabled() and not torch.compiler.is_exporting():
            _check_needs_no_grad(op, arguments)
        return op.fake(arguments)

    return run


def _loaded(function: OpCallable | str | None) -> OpCallable:
    assert function is not None
    return _load(function) if isinstance(function, str) else function


def _device(arguments: Any) -> torch.device:
    """Where a call is: with its first tensor."""
    return next(tensor.device for _, tensor in _tensors(arguments))


def _tensors(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A record's tensors, those of its lists too, each with its argument's name."""
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield field.name, item


@cache
def _load(entry: str) -> OpCallable:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _defined_elsewhere(op: FusedOp) -> bool:
    return bool(torch._C._dispatch_has_kernel(op.qualified_name))


def _identity(op: FusedOp) -> tuple[Any, ...]:
    code = (op.validate, op.validate_values, op.fake, op.reference)
    return (op.declaration, tuple((f.__module__, f.__qualname__) for f in code))


def _where(op: FusedOp) -> str:
    return f"{op.reference.__module__}.{op.reference.__qualname__}"


def _default(argument: Any) -> Any:
    """A schema argument's default as a dataclass writes it: a list cannot be one, a tuple can."""
    if not argument.has_default_value():
        return MISSING
    value = argument.default_value
    return tuple(value) if isinstance(value, list) else value


def _check_arguments(op: FusedOp) -> None:
    schema = torch._C.parse_schema(op.declaration)
    declared = [(a.name, a.kwarg_only, _default(a)) for a in schema.arguments]
    written = [(f.name, f.kw_only, f.default) for f in ordered_fields(op.arguments)]
    if written != declared:
        raise ValueError(
            f"{op.qualified_name}: the fields of {op.arguments.__qualname__} {written} are not the "
            f"arguments of its schema {declared}"
        )
