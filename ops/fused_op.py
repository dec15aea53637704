"""The declaration of a fused op: one frozen record, and the ways to compute it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import torch

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import FAMILIES, Target, get_target
from tilewright.ops.cache.read import Work
from tilewright.ops.reference.tolerances import ONE_ROUNDING, TOLERANCES
from tilewright.ops.runtime.device import emits_for
from tilewright.ops.runtime.program import Planner, Steps, drive
from tilewright.ops.schema import ordered_fields, schema_of
from tilewright.ops.tolerance import Tolerance

OpCallable = Callable[..., Any]


@dataclass(frozen=True)
class Lowering:
    """One way to compute an op.

    `build` takes the arguments record and the target, and generates the steps of a call
    (`ops.runtime.program`). The call is run, repeated and reported from these steps. A lowering
    without `build` has `entry`, which is called exactly like the op. Each may be "module:function",
    which is imported on first use. `unsupported` takes the arguments record, and returns why this
    lowering cannot take the call; None if it can.
    """

    name: str
    entry: OpCallable | str | None
    device_types: frozenset[str]
    unsupported: Callable[[Any], str | None]
    build: Callable[[Any, Target], Steps] | str | None = None

    def __post_init__(self) -> None:
        if (self.entry is None) == (self.build is None):
            raise ValueError(f"lowering {self.name!r}: expected one of entry and build")


def _anything(arguments: Any) -> str | None:
    return None


def emitted_kernel(
    build: Callable[[Any, Target], Steps] | str,
    unsupported: Callable[[Any], str | None] = _anything,
    dtypes: Sequence[torch.dtype] = (),
) -> Lowering:
    """Returns the lowering whose steps launch emitted kernels; see Lowering.

    dtypes: the dtypes of the op's first argument that the kernels take; empty: any.
    """

    def obstacle(arguments: Any) -> str | None:
        dtype = getattr(arguments, ordered_fields(type(arguments))[0].name).dtype
        return f"no kernel for {dtype}" if dtype not in dtypes else unsupported(arguments)

    reason = obstacle if dtypes else unsupported
    return Lowering("emitted_kernel", None, frozenset({"cuda"}), reason, build=build)


@dataclass(frozen=True)
class Choice:
    """The lowering chosen for a call, and why each lowering before it was rejected."""

    lowering: Lowering
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LoweringReport:
    """How a call is computed at given shapes on a target: the lowering's name, the reason for it,
    and its emitted kernels."""

    name: str
    reason: str
    specs: tuple[KernelSpec, ...] = ()


@dataclass(frozen=True)
class FusedOp:
    """The declaration of one fused op.

    Calling the record calls `torch.ops.<namespace>.<name>`, with tensors and options.

    arguments: a dataclass whose fields are the op's arguments, typed as `ops.schema` says; the
        callables below take one instance of it.
    validate: checks metadata only, raises ArgumentError; also runs on fake tensors and adds no
        guard. Accepted metadata is remembered.
    reference: defines the meaning; fp32 arithmetic (float64 for float64 inputs), rounded once.
    lowerings: tried in order; the reference is always the last resort.
    cases: settings that together reach every option of the op.
    sample_inputs: sample_inputs(case, device="cpu", seed=0) returns an instance of `arguments`.
    tolerances: per dtype of the op's result; by default those of fp32 sums that are rounded once.
    error_model: the reasoning behind `tolerances`, in words.
    fake: returns outputs with the right metadata; by default each is like the first argument.
    validate_values: checks that need real memory (index values, aliases); runs before any write.
    plan: plan(arguments, target name) returns a LoweringReport, also for fake arguments and
        without a GPU; may be "module:function". None: the report comes from `build`.
    returns: the result in the schema: "(Tensor, Tensor)", or "()" for None.
    schema: "(Tensor x, Tensor(a!) cache) -> Tensor"; replaces the schema made from the fields and
        `returns`, for what they cannot express.
    work: returns the Work of a call, from the arguments' metadata; may be "module:function". None:
        the call reads no cache and does the work of the nodes that it replaces.
    tuning: for an op with the argument `tune`: tuning(target name) returns a line for reports that
        says what is measured, and where; may be "module:function".
    moving: arguments whose address may change when a call is repeated (`ops.runtime.replay`): the
        steps of every lowering depend on their addresses only modulo 16. Must be empty for an op
        that writes an argument, because no other argument may share memory with the written
        argument.
    slower: slower(**sizes), with the sizes of a call by name, returns why PyTorch's own calls are
        faster at these sizes. Returns None if the op is faster, and for symbolic sizes. Patterns
        call it.
    slower_on: slower_on(arguments, target, varies) returns why the graph is faster than a call with
        these arguments on a chip, even if kernels can take the call. Returns None if the call is
        faster. varies: whether a size of the tensors is a symbol. The rewrite calls this for
        matches that need a kernel.
    chip_obstacle: chip_obstacle(arguments, target) returns why a chip cannot compute a call with
        these arguments, even if it can compute other calls of the op. Returns None if it can.
        Without chip_obstacle, support does not depend on the arguments.
    without_writes: an op with the same arguments, for traced calls in which every argument to write
        is None. It replaces this op there, because torch's functionalisation does not support a
        mutating op that writes nothing.
    """

    name: str
    arguments: type[Any]
    validate: Callable[[Any], None]
    reference: Callable[[Any], Any]
    lowerings: tuple[Lowering, ...]
    cases: tuple[Any, ...]
    sample_inputs: Callable[..., Any]
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: TOLERANCES)
    error_model: str = ONE_ROUNDING
    fake: Callable[[Any], Any] | None = None
    validate_values: Callable[[Any], None] = lambda a: None
    namespace: str = "tilewright"
    plan: Callable[[Any, str], LoweringReport] | str | None = None
    returns: str = "Tensor"
    schema: str | None = None
    work: Callable[[Any], Work] | str | None = None
    tuning: Callable[[str], str] | str | None = None
    moving: frozenset[str] = frozenset()
    without_writes: str = ""
    slower: Callable[..., str | None] = lambda **sizes: None
    slower_on: Callable[[Any, Target, bool], str | None] = lambda a, target, varies: None
    chip_obstacle: Callable[[Any, Target], str | None] | None = None

    def plan_for(self, arguments: Any, target: str) -> LoweringReport:
        """Returns the lowering that these arguments get on `target`, and why. Metadata suffices."""
        choice = self.choose("cuda", arguments, get_target(target))
        if self.plan is None and choice.lowering.build is None and not choice.rejected:
            return LoweringReport("reference", "the op declares no kernel")
        if self.lowerings and choice.lowering.name == "reference":
            reasons = (f"{name}: {reason}" for name, reason in choice.rejected)
            return LoweringReport("reference", "; ".join(reasons))
        if self.plan is not None:
            return loaded(self.plan)(arguments, target)
        planner = Planner(get_target(target))
        steps = loaded(choice.lowering.build)(arguments, planner.target)
        program = drive(steps, planner, keep=True)
        outcome = program.outcome
        return LoweringReport(outcome.name, str(outcome.reason), program.specs)

    def work_of(self, arguments: Any) -> Work:
        """Returns the Work of a call of these arguments; metadata suffices."""
        return Work() if self.work is None else loaded(self.work)(arguments)

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def torch_op(self) -> Any:
        """`torch.ops.<namespace>.<name>.default`; the op must be registered."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @cached_property
    def declaration(self) -> str:
        """Name and schema, in the form that `torch.library.Library.define` takes."""
        return self.name + (self.schema or schema_of(self.arguments, self.returns))

    @cached_property
    def schema_arguments(self) -> Sequence[Any]:
        """The schema's arguments, as PyTorch parses them."""
        return tuple(torch._C.parse_schema(self.declaration).arguments)

    @cached_property
    def parameters(self) -> Mapping[str, bool]:
        """Names of the schema's arguments, in order, and whether each is keyword-only."""
        return {argument.name: argument.kwarg_only for argument in self.schema_arguments}

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """PyTorch's name for the type of each argument: "Tensor", "Optional[Tensor]",
        "List[int]"."""
        return {argument.name: str(argument.type) for argument in self.schema_arguments}

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that the schema declares as written."""
        written = self.schema_arguments
        return tuple(a.name for a in written if a.alias_info and a.alias_info.is_write)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the registered op with its arguments, as the fields of `arguments`. Raises
        ArgumentError."""
        return self.torch_op(*args, **options)

    def faked(self, arguments: Any) -> Any:
        """Returns outputs with the right metadata."""
        if self.fake is not None:
            return self.fake(arguments)
        like = getattr(arguments, next(iter(self.parameters)))
        results = torch._C.parse_schema(self.declaration).returns
        made = tuple(like.new_empty(like.shape) for _ in results)
        return made[0] if len(made) == 1 else made or None

    def call(self, arguments: Any) -> Any:
        """Calls the registered op with an instance of `arguments`."""
        args, kwargs = self.split(arguments)
        return self.torch_op(*args, **kwargs)

    def split(self, arguments: Any) -> tuple[list[Any], dict[str, Any]]:
        """Splits an instance of `arguments` into the op's positional and keyword arguments."""
        positional = [f for f in fields(self.arguments) if not f.kw_only]
        keyword = [f for f in fields(self.arguments) if f.kw_only]
        return (
            [getattr(arguments, f.name) for f in positional],
            {f.name: getattr(arguments, f.name) for f in keyword},
        )

    def choose(self, device_type: str, arguments: Any, target: Target | None = None) -> Choice:
        """Returns the first lowering that takes these arguments. Reads metadata only, so fake
        tensors suffice.

        target: the target of emitted kernels. With None, choose does not check that the target has
            kernels for the op.
        """
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
        """The folder of `ops/` that declares the op; empty for an op from elsewhere."""
        package, _, rest = self.arguments.__module__.partition(".ops.")
        return rest.partition(".")[0] if package == "tilewright" else ""

    def target_obstacle(self, arguments: Any, target: Target) -> str | None:
        """Returns why a chip has no emitted kernels for a call; None if it may have some."""
        if self.family and self.family not in FAMILIES:
            return f"codegen/targets.py FAMILIES has no entry {self.family!r}, its folder of ops/"
        if self.family and self.family not in target.families:
            return f"its kernels are not audited for {target.name}"
        if target.has("fp8"):
            return self.chip_obstacle and self.chip_obstacle(arguments, target)
        for name, tensor in tensors_of(arguments):
            if tensor.dtype == torch.float8_e4m3fn:
                return f"{name} is of float8_e4m3fn, which {target.name} does not have"
        return None

    def has_lowering_on(self, device: torch.device) -> bool:
        """Whether some lowering supports `device`, for any arguments. True for an op that declares
        no lowering, and for meta tensors, which stand for tensors of the GPU that is planned for.
        """
        if not self.lowerings or device.type == "meta":
            return True
        return any(
            device.type in lowering.device_types and (lowering.build is None or emits_for(device))
            for lowering in self.lowerings
        )

    def reference_lowering(self) -> Lowering:
        """Returns the reference as a lowering, the last resort."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.reference(self.arguments(*args, **kwargs))

        return Lowering("reference", run, frozenset({"cpu", "cuda"}), _anything)


def loaded(function: OpCallable | str | None) -> OpCallable:
    assert function is not None
    return _load(function) if isinstance(function, str) else function


def device_of(arguments: Any) -> torch.device:
    """Returns the device of a call: that of its first tensor."""
    return next(tensor.device for _, tensor in tensors_of(arguments))


def tensors_of(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a record, including those in its lists, each with its argument's
    name."""
    for one in fields(arguments):
        value = getattr(arguments, one.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield one.name, item


@cache
def _load(entry: str) -> OpCallable:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)
