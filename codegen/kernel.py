"""Defines `Kernel`: a kernel of a template, and the meaning of each of the kernel's parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tilewright.codegen.arithmetic import INT32_MAX
from tilewright.codegen.emit.source import Library
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, module_of
from tilewright.codegen.targets import get_target

POINTER_SUFFIX = "_ptr"
# The name of a constant. If the constant is true, the kernel may start while the previous kernel
# still runs (programmatic dependent launch). The target determines the constant's value.
LAUNCH_PDL = "LAUNCH_PDL"
# The names of Triton's compile options. The `records` of `Kernel.spec` may have fields of these
# names.
OPTIONS = ("num_warps", "num_stages", "maxnreg")

#: The role of a kernel. Reports count the kernels of each role. Three kinds of kernels have a role:
#: those that prepare x for a product of codes, those that decode codes for a library's product, and
#: those that read an expert's weights once for each token that chooses the expert. All other
#: kernels have the role "".
Role = Literal["", "prepares x", "decodes codes", "reads experts by token"]
#: The stride of one dimension of a tensor, as (tensor, dimension).
Stride = tuple[str, int]
#: Constants that are strides, by name. Each is one stride or a tuple of several strides.
Strides = Mapping[str, Stride | tuple[Stride, ...]]


def strides_of(tensor: str, prefix: str = "", **dims: int) -> dict[str, Stride]:
    """Returns the strides of a tensor, by the names `<prefix>_<axis>_stride`. prefix: the tensor's
    name by default. dims: the name of each axis, with the number of its dimension."""
    return {f"{prefix or tensor}_{axis}_stride": (tensor, dim) for axis, dim in dims.items()}


class Number(NamedTuple):
    """A parameter that is a number known at the launch.

    Attributes:
        name: The name of the parameter.
        divisible: Whether the spec says if 16 divides the number.
        stride: If the number is a stride, the tensor and the dimension that it belongs to; else
            None.
    """

    name: str
    divisible: bool
    stride: Stride | None


class Pointer(NamedTuple):
    """A parameter that points to a tensor.

    Attributes:
        parameter, tensor: The names of the parameter and of the tensor.
        dims: The dimensions whose strides are constants.
        aligned: Whether the spec records the alignment of the pointer.
        optional: Whether the parameter has a default.
    """

    parameter: str
    tensor: str
    dims: tuple[int, ...]
    aligned: bool
    optional: bool


class Statics:
    """One object with the attributes of several records, and with more constants as attributes.
    Together, they describe one kind of call.

    Two objects of this class are equal only if they are the same object. Therefore a caller that
    keeps such an object, for example together with a plan, need not hash its records at each
    launch.
    """

    def __init__(self, *records: object, **constants: Constant) -> None:
        self.records = records
        self.__dict__.update({name.lower(): value for name, value in constants.items()})

    def __getattr__(self, name: str) -> Any:
        for record in self.__dict__.get("records", ()):
            if hasattr(record, name):
                return getattr(record, name)
        raise AttributeError(name)


_ROLES: dict[tuple[str, str], Role] = {}


def role_of(spec: KernelSpec) -> Role:
    """Returns the role of the kernel that a spec was made of. The spec does not contain the role,
    so the role does not change the spec's hash."""
    return _ROLES.get((spec.template, spec.kernel), "")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of a template. The signature of the template's function says what a launch needs:
    the parameter `x_ptr` points to the tensor "x", a `tl.constexpr` is a constant, and any other
    parameter is a number known at the launch.

    Attributes:
        template, name: The values of `KernelSpec.template` and `KernelSpec.kernel`.
        strides: Constants that are strides: the stride of one dimension of a tensor, or a tuple of
            several strides. A launch may give other values for these constants. The stride of an
            absent tensor is 0. A constant `X_STRIDE` need not be listed if it is the stride of the
            first dimension of the tensor "x".
        launch_strides: Numbers of type "i64" that are strides of one dimension. The spec records
            whether 16 divides them. The stride is 0 if the tensor is absent or has no such
            dimension.
        broadcast: Tensors that are broadcast. In `launch_strides`, their dimensions of at most one
            element have the stride 0.
        types: The Triton types of numbers that are not "i32" and are not in `launch_strides`.
        ranges: Numbers that are counts, from 1 to INT32_MAX.
        divisible: Numbers for which the spec records whether 16 divides them.
        unaligned: Tensors for which the spec does not record the alignment, and strides in
            `launch_strides` for which the spec does not record the divisibility.
        omitted: Constants that a spec does not contain if their value is the default in the
            signature.
        dependent: Whether a kernel that has the constant LAUNCH_PDL may start before the previous
            kernel ends.
        num_warps, num_stages: Triton's options, unless a record has them.
        role: The role that `role_of` returns for the kernel's specs.
    """

    template: str
    name: str
    strides: Strides = field(default_factory=dict)
    launch_strides: Mapping[str, Stride] = field(default_factory=dict)
    broadcast: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    ranges: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    dependent: bool = True
    num_warps: int = 4
    num_stages: int = 2
    role: Role = ""

    def __post_init__(self) -> None:
        if self.role:
            _ROLES[self.template, self.name] = self.role

    @cached_property
    def specs(self) -> dict[object, KernelSpec]:
        """The specs of earlier launches. The code that launches the kernel stores the specs here,
        by keys that this code chooses."""
        return {}

    @cached_property
    def pointers(self) -> tuple[Pointer, ...]:
        """The parameters that point to tensors, in the order of the signature."""
        dims: dict[str, list[int]] = {}
        for name, dim in dict.fromkeys(
            place for places in self._places.values() for place in places
        ):
            dims.setdefault(name, []).append(dim)
        found = {
            p: p.removesuffix(POINTER_SUFFIX) for p in self._names if p.endswith(POINTER_SUFFIX)
        }
        self._check("strides", dims, found.values())
        self._check("unaligned", self.unaligned, [*found.values(), *self.launch_strides])
        return tuple(
            Pointer(
                parameter,
                name,
                tuple(dims.get(name, ())),
                name not in self.unaligned,
                parameter in self._optional,
            )
            for parameter, name in found.items()
        )

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """The parameters that are numbers known at the launch, in the order of the signature."""
        known = {*self._constexprs, *(pointer.parameter for pointer in self.pointers)}
        found = [name for name in self._names if name not in known]
        for what in ("launch_strides", "types", "ranges", "divisible"):
            self._check(what, getattr(self, what), found)
        self._check("broadcast", self.broadcast, (p.tensor for p in self.pointers))
        told = {*self.divisible, *self.launch_strides}.difference(self.unaligned)
        return tuple(Number(name, name in told, self.launch_strides.get(name)) for name in found)

    def spec(
        self,
        target: str,
        operands: Mapping[str, Operand | None],
        constants: Mapping[str, Constant],
        records: Iterable[object] = (),
        divisible: Iterable[str] = (),
    ) -> KernelSpec:
        """Returns the spec of a launch.

        Args:
            target: The name of the target.
            operands: The tensors by name. Each operand has the strides of its pointer's `dims`, in
                that order.
            constants: The constants and Triton's options by name. If a number of the signature is
                given here, it becomes a constant of the spec.
            records: Objects that have more constants as attributes, in lower case, and Triton's
                options. If several records have the same constant or option, the first record
                counts.
            divisible: The names of the numbers that 16 divides.

        Raises ValueError if a constant is missing, or if a given name is not a constant of the
        kernel.
        """
        records = tuple(records)
        self._check("constants", constants, [*self._names, *OPTIONS])
        options = {name: constants[name] for name in OPTIONS if name in constants}
        signature, known = self._arguments(operands, constants)
        given = {pointer.parameter: operands[pointer.tensor] for pointer in self.pointers}
        aligned = [name for name, operand in given.items() if operand and operand.aligned]
        if self.dependent and LAUNCH_PDL in self._constexprs:
            known[LAUNCH_PDL] = get_target(target).has("dependent_launch")
        return KernelSpec.make(
            self.template,
            self.name,
            {**self._constants(operands, constants, records), **known},
            signature,
            divisible16=[*aligned, *(name for name in divisible if name in signature)],
            ranges={name: (1, INT32_MAX) for name in self.ranges if name in signature},
            target=target,
            launch_pdl=bool(known.get(LAUNCH_PDL)),
            **(_options((*records, self)) | options),
        )

    def _constants(
        self,
        operands: Mapping[str, Operand | None],
        constants: Mapping[str, Constant],
        records: tuple[object, ...],
    ) -> dict[str, Constant]:
        """Returns the constants of a spec, except constants that have a default and are not
        given."""
        found: dict[str, Constant] = {}
        for name in self._constexprs:
            having = next((record for record in records if hasattr(record, name.lower())), None)
            if name in constants:
                found[name] = constants[name]
            elif having is not None:
                found[name] = getattr(having, name.lower())
            elif name in self._places:
                places = self._places[name]
                if name in self._optional and not any(operands[tensor] for tensor, _ in places):
                    continue
                values = tuple(
                    self._stride(operands[tensor], tensor, dim) for tensor, dim in places
                )
                found[name] = values if self.strides.get(name) is places else values[0]
            elif name not in self._optional and name != LAUNCH_PDL:
                raise ValueError(f"{self}: expected a value for the constant {name}, got none")
        for name in self.omitted:
            if name in found and found[name] == ast.literal_eval(self._optional[name]):
                del found[name]
        return found

    def _arguments(
        self, operands: Mapping[str, Operand | None], constants: Mapping[str, Constant]
    ) -> tuple[dict[str, str], dict[str, Constant]]:
        """Returns (signature, constants).

        The signature has a pointer for each operand that is present, and all numbers that
        `constants` does not give. If an operand is absent and its parameter has no default, the
        parameter is the constant None.
        """
        pointers = {pointer.parameter: pointer for pointer in self.pointers}
        types = {number.name: "i64" if number.stride else "i32" for number in self.numbers}
        types |= self.types
        signature: dict[str, str] = {}
        known: dict[str, Constant] = {}
        for name in self._names:
            pointer = pointers.get(name)
            if pointer is None:
                if name in types and name in constants:
                    known[name] = constants[name]
                elif name in types:
                    signature[name] = types[name]
            elif (operand := operands[pointer.tensor]) is not None:
                signature[name] = f"*{operand.dtype}"
            elif not pointer.optional:
                known[name] = None
        return signature, known

    def _stride(self, operand: Operand | None, tensor: str, dim: int) -> int:
        if operand is None:
            return 0
        dims = next(pointer.dims for pointer in self.pointers if pointer.tensor == tensor)
        return operand.strides[dims.index(dim)]

    @cached_property
    def _places(self) -> dict[str, tuple[Stride, ...]]:
        """Maps each constant that holds strides to the dimensions whose strides it holds."""
        found: dict[str, Stride | tuple[Stride, ...]] = {}
        for name in self._constexprs.difference(self._optional):
            tensor = name.removesuffix("_STRIDE").lower()
            if name.endswith("_STRIDE") and tensor + POINTER_SUFFIX in self._names:
                found[name] = (tensor, 0)
        return {
            name: (places,) if isinstance(places[0], str) else places
            for name, places in (found | dict(self.strides)).items()
        }

    @cached_property
    def _function(self) -> ast.arguments:
        return Library().load(module_of(self.template)).functions[self.name].args

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(argument.arg for argument in self._function.args)

    @cached_property
    def _constexprs(self) -> frozenset[str]:
        found = frozenset(a.arg for a in self._function.args if _is_constexpr(a.annotation))
        self._check("strides", self.strides, found)
        self._check("omitted", self.omitted, found & self._optional.keys())
        return found

    @cached_property
    def _optional(self) -> dict[str, ast.expr]:
        """Maps each parameter that has a default to its default."""
        defaults = self._function.defaults
        names = self._names[len(self._names) - len(defaults) :]
        return dict(zip(names, defaults, strict=True))

    def _check(self, what: str, named: Iterable[str], known: Iterable[str]) -> None:
        unknown = sorted(set(named) - set(known))
        if unknown:
            expected = sorted(set(known))
            raise ValueError(f"{self}: {what}: expected names of {expected}, got {unknown}")

    def __str__(self) -> str:
        return f"{self.template}.{self.name}"


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Attribute) and annotation.attr == "constexpr"


def _options(records: Iterable[object]) -> dict[str, Any]:
    """Returns Triton's options from records. If several records have the same option, the first
    record counts."""
    found: dict[str, Any] = {}
    for record in records:
        for name in OPTIONS:
            if hasattr(record, name):
                found.setdefault(name, getattr(record, name))
    return found
