"""The declaration of a fused op: one frozen record, with the ways to compute the op."""

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
    """One way to compute an op. It has either `build` or `entry`.

    Attributes:
        name: The name of the lowering.
        entry: A function that is called exactly like the op. It may be given as "module:function",
            which is imported on first use.
        device_types: The device types on which the lowering runs.
        unsupported: A function that takes the arguments record, and returns why this lowering
            cannot compute the call; None if it can.
        build: A function that takes the arguments record and the target, and generates the steps of
            a call (`ops.runtime.program`). The call is run, repeated and reported from these steps.
            It may be given as "module:function", too.
    """

    name: str
    entry: OpCallable | str | None
    device_types: frozenset[str]
    unsupported: Callable[[Any], str | None]
    build: Callable[[Any, Target], Steps] | str | None = None

    def __post_init__(self) -> None:
        if (self.entry is None) == (self.build is None):
            raise ValueError(f"lowering {self.name!r}: expected exactly one of entry and build")


def _anything(arguments: Any) -> str | None:
    return None


def emitted_kernel(
    build: Callable[[Any, Target], Steps] | str,
    unsupported: Callable[[Any], str | None] = _anything,
    dtypes: Sequence[torch.dtype] = (),
) -> Lowering:
    """Returns a lowering whose steps launch emitted kernels; see Lowering.

    dtypes: the dtypes of the op's first argument that the kernels support. If it is empty, they
    support any dtype.
    """

    def obstacle(arguments: Any) -> str | None:
        dtype = getattr(arguments, ordered_fields(type(arguments))[0].name).dtype
        return f"no kernel for {dtype}" if dtype not in dtypes else unsupported(arguments)

    reason = obstacle if dtypes else unsupported
    return Lowering("emitted_kernel", None, frozenset({"cuda"}), reason, build=build)


@dataclass(frozen=True)
class Choice:
    """The lowering that was chosen for a call, and why each lowering before it was rejected."""

    lowering: Lowering
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LoweringReport:
    """How a call is computed at given shapes on a target: the lowering's name, the reason for the
    choice, and its emitted kernels."""

    name: str
    reason: str
    specs: tuple[KernelSpec, ...] = ()


@dataclass(frozen=True)
class FusedOp:
    """The declaration of one fused op.

    Calling the record calls `torch.ops.<namespace>.<name>`, with tensors and options.

    Attributes:
        name: The name of the op.
        arguments: A dataclass whose fields are the op's arguments, typed as `ops.schema` says. The
            functions below take an instance of it.
        validate: Checks metadata and raises ArgumentError. It also runs on fake tensors, and must
            not add guards. Metadata that it accepts is not checked again.
        reference: Computes the op in PyTorch, in fp32 (float64 for float64 inputs), rounded once.
            It defines the results of the op.
        lowerings: The lowerings, which are tried in order. If none of them can compute a call, the
            reference does.
        cases: Sample settings that together use every option of the op.
        sample_inputs: sample_inputs(case, device="cpu", seed=0) returns an instance of `arguments`.
        tolerances: The tolerances for each dtype of the result. By default, they are the tolerances
            of fp32 sums that are rounded once.
        error_model: A text that justifies `tolerances`.
        fake: Returns outputs with the right metadata. By default, the outputs are like the first
            argument.
        validate_values: Performs the checks that need real tensors, not fake ones: values of
            indices, and aliases. It runs before anything is written.
        namespace: The namespace of the op in torch.ops.
        plan: plan(arguments, target name) returns a LoweringReport. It also works for fake
            arguments and without a GPU. It may be "module:function". If it is None, the report
            comes from `build`.
        returns: The result in the schema: "(Tensor, Tensor)", or "()" for None.
        schema: A text such as "(Tensor x, Tensor(a!) cache) -> Tensor". If the fields and `returns`
            cannot express the schema, this text is the schema.
        work: work(arguments) returns the Work of a call, from metadata. It may be
            "module:function". If it is None, the call reads no cache and does the work of the nodes
            that it replaces.
        tuning: For an op with the argument `tune`, tuning(target name) returns a line for reports,
            which says what is measured, and where. It may be "module:function".
        moving: The arguments whose addresses may change when a call is repeated
            (`ops.runtime.replay`). The steps of every lowering may depend on these addresses only
            modulo 16. `moving` must be empty for an op that writes an argument: a repeated call
            does not check again that no other argument shares memory with the written argument.
        slower: slower(**sizes) returns why PyTorch's own calls are faster for a call with these
            sizes, which are given by name. It returns None if the op is faster, and for symbolic
            sizes. Patterns call it.
        slower_on: slower_on(arguments, target, varies) returns why the original graph is faster
            than a call with these arguments on a chip, even if kernels can compute the call. It
            returns None if the call is faster. varies: whether a size of the tensors is a symbol.
            The rewrite calls slower_on for matches that need a kernel.
        chip_obstacle: chip_obstacle(arguments, target) returns why a chip cannot compute a call
            with these arguments, even if it can compute other calls of the op. It returns None if
            the chip can. If chip_obstacle is None, support does not depend on the arguments.
        without_writes: The name of an op with the same arguments. That op replaces this op in
            traced calls in which every written argument is None, because torch's functionalisation
            does not support a mutating op that writes nothing.
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
        """Returns the lowering that computes a call with these arguments on `target`, and why. This
        needs only metadata."""
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
        """Returns the Work of a call with these arguments. This needs only metadata."""
        return Work() if self.work is None else loaded(self.work)(arguments)

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def torch_op(self) -> Any:
        """The op overload `torch.ops.<namespace>.<name>.default`. The op must have been
        registered."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @cached_property
    def declaration(self) -> str:
        """The name and the schema, in the form that `torch.library.Library.define` expects."""
        return self.name + (self.schema or schema_of(self.arguments, self.returns))

    @cached_property
    def schema_arguments(self) -> Sequence[Any]:
        """The schema's arguments, as PyTorch parses them."""
        return tuple(torch._C.parse_schema(self.declaration).arguments)

    @cached_property
    def parameters(self) -> Mapping[str, bool]:
        """The names of the schema's arguments, in order, and whether each is keyword-only."""
        return {argument.name: argument.kwarg_only for argument in self.schema_arguments}

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """PyTorch's name for the type of each argument, such as "Tensor", "Optional[Tensor]" or
        "List[int]"."""
        return {argument.name: str(argument.type) for argument in self.schema_arguments}

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes according to its schema."""
        written = self.schema_arguments
        return tuple(a.name for a in written if a.alias_info and a.alias_info.is_write)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the registered op. The arguments are the fields of `arguments`. Raises
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
        """Returns the first lowering that can compute a call with these arguments. Reads only
        metadata, so fake tensors suffice.

        target: the target of emitted kernels. If it is None, this function does not check whether
        the target has kernels for the op.
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
        """The folder of `ops/` that declares the op; "" for an op that is declared elsewhere."""
        package, _, rest = self.arguments.__module__.partition(".ops.")
        return rest.partition(".")[0] if package == "tilewright" else ""

    def target_obstacle(self, arguments: Any, target: Target) -> str | None:
        """Returns why a chip has no emitted kernels for a call; None if it may have kernels."""
        if self.family and self.family not in FAMILIES:
            return f"FAMILIES in codegen/targets.py has no entry for the folder ops/{self.family}"
        if self.family and self.family not in target.families:
            return f"its kernels are not audited for {target.name}"
        if target.has("fp8"):
            return self.chip_obstacle and self.chip_obstacle(arguments, target)
        for name, tensor in tensors_of(arguments):
            if tensor.dtype == torch.float8_e4m3fn:
                return f"{name} has the dtype float8_e4m3fn, which {target.name} does not support"
        return None

    def has_lowering_on(self, device: torch.device) -> bool:
        """Whether some lowering supports `device`, for any arguments. The result is True for an op
        that declares no lowering. It is also True for meta tensors, which stand for tensors of the
        GPU that is planned for."""
        if not self.lowerings or device.type == "meta":
            return True
        return any(
            device.type in lowering.device_types and (lowering.build is None or emits_for(device))
            for lowering in self.lowerings
        )

    def reference_lowering(self) -> Lowering:
        """Returns the reference as a lowering, which computes calls that no other lowering can."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.reference(self.arguments(*args, **kwargs))

        return Lowering("reference", run, frozenset({"cpu", "cuda"}), _anything)


def loaded(function: OpCallable | str | None) -> OpCallable:
    assert function is not None
    return _load(function) if isinstance(function, str) else function


def device_of(arguments: Any) -> torch.device:
    """Returns the device of a call, which is the device of its first tensor."""
    return next(tensor.device for _, tensor in tensors_of(arguments))


def tensors_of(arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name of the argument, tensor) for each tensor of a record, including tensors in its
    lists."""
    for one in fields(arguments):
        value = getattr(arguments, one.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield one.name, item


@cache
def _load(entry: str) -> OpCallable:
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)
