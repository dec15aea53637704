"""Defines KernelSpec, the record of everything that is static about one kernel. The kernel's name
and its cache key contain the spec's hash."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.codegen.targets import TARGETS

Scalar = int | float | bool | str | None
Constant = Scalar | tuple[Scalar, ...]

SCALAR_TYPES = frozenset(
    {"i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64"}
)
POINTEE_TYPES = SCALAR_TYPES | {"fp8e4nv", "fp8e5"}

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TENSORDESC = re.compile(r"tensordesc<([a-z0-9]+)\[(\d+(?:,\s*\d+)*)\]>\Z")


def is_pointer(type_name: str) -> bool:
    """Whether a signature type is a pointer ("*bf16")."""
    return type_name.startswith("*")


def is_integer(type_name: str) -> bool:
    """Whether a signature type is an integer scalar."""
    return type_name in SCALAR_TYPES and type_name[0] in "iu"


def _check_type(name: str, type_name: str) -> None:
    descriptor = _TENSORDESC.match(type_name)
    if descriptor:
        valid = descriptor.group(1) in POINTEE_TYPES
    elif is_pointer(type_name):
        valid = type_name[1:] in POINTEE_TYPES
    else:
        valid = type_name in SCALAR_TYPES
    if not valid:
        raise ValueError(
            f"signature[{name!r}]: expected a Triton type such as '*bf16', 'i32' or "
            f"'tensordesc<bf16[128, 64]>', got {type_name!r}"
        )


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not _IDENTIFIER.match(name):
        raise ValueError(f"{what}: expected a Python identifier, got {name!r}")


def _check_constant(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_scalar(f"{name}[{index}]", item)
    else:
        _check_scalar(name, value)


def _check_scalar(name: str, value: object) -> None:
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(
            f"constants[{name!r}]: expected int, float, bool, str, None or a tuple, "
            f"got {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"constants[{name!r}]: expected a finite float, got {value}")


def module_of(template: str) -> str:
    """Returns the dotted path of the module that `KernelSpec.template` refers to."""
    here = Path(__file__).parent
    family, _, name = template.rpartition(".")
    if (here / family / "templates" / f"{name}.py").is_file():
        room = f"{family}.templates" if family else "templates"
        return f"tilewright.codegen.{room}.{name}"
    return template


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel of one template, with a value for every static parameter.

    Make specs with :meth:`make`, which takes dicts and sorts them. The fields are in a canonical
    form, so equal kernels have equal specs and equal hashes.

    Attributes:
        template: `family.module` for a module in tilewright.codegen.<family>.templates, or the
            import name of any other module.
        kernel: The name of the module's `@triton.jit` function.
        constants: Pairs (constexpr parameter, value), sorted by name.
        signature: Pairs (run-time parameter, Triton type), in the order of the kernel.
        divisible16: The run-time parameters that are divisible by 16, sorted. A pointer in this
            list is aligned to 16 bytes. The caller guarantees the divisibility. Triton uses it as
            `tt.divisibility`, and the emitter uses the divisibility of integers.
        num_warps, num_stages: Triton's compile options.
        target: A key of TARGETS.
        grid: The launch grid if it is static; None if the caller computes it. The caller guarantees
            that it launches exactly this grid, because the emitter drops masks that are unnecessary
            with this grid.
        ranges: Triples (integer run-time parameter, smallest value, largest value), sorted. The
            caller guarantees these bounds.
        maxnreg: The largest number of registers of a thread, or None.
        launch_pdl: Whether the kernel may start while the previous kernel ends. The kernel itself
            waits for the previous kernel (`gdc_wait`) before it accesses memory.
    """

    template: str
    kernel: str
    constants: tuple[tuple[str, Constant], ...]
    signature: tuple[tuple[str, str], ...]
    divisible16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    target: str = "sm100"
    grid: tuple[int, ...] | None = None
    ranges: tuple[tuple[str, int, int], ...] = ()
    maxnreg: int | None = None
    launch_pdl: bool = False

    def __post_init__(self) -> None:
        _check_name("kernel", self.kernel)
        for part in self.template.split("."):
            _check_name("template", part)
        self._check_arguments()
        self._check_facts()
        if self.num_warps < 1 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"num_warps: expected a power of two, got {self.num_warps}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages: expected at least 1, got {self.num_stages}")
        if self.target not in TARGETS:
            raise ValueError(f"target: expected one of {sorted(TARGETS)}, got {self.target!r}")
        if self.grid is not None and not (
            1 <= len(self.grid) <= 3 and all(extent >= 1 for extent in self.grid)
        ):
            raise ValueError(f"grid: expected one to three positive extents, got {self.grid}")

    def _check_arguments(self) -> None:
        for name, value in self.constants:
            _check_name("constants", name)
            _check_constant(name, value)
        for name, type_name in self.signature:
            _check_name("signature", name)
            _check_type(name, type_name)
        names = [name for name, _ in self.constants] + [name for name, _ in self.signature]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"constants and signature: expected distinct names, got {twice} twice")
        if [name for name, _ in self.constants] != sorted(name for name, _ in self.constants):
            raise ValueError("constants: expected pairs sorted by name; use KernelSpec.make")

    def _check_facts(self) -> None:
        types = dict(self.signature)
        if list(self.divisible16) != sorted(set(self.divisible16)):
            raise ValueError("divisible16: expected sorted distinct names; use KernelSpec.make")
        for name in self.divisible16:
            if not (name in types and (is_pointer(types[name]) or is_integer(types[name]))):
                raise ValueError(
                    f"divisible16: {name!r} is not a pointer or integer of the signature"
                )
        if list(self.ranges) != sorted(self.ranges):
            raise ValueError("ranges: expected triples sorted by name; use KernelSpec.make")
        for name, low, high in self.ranges:
            if not (name in types and is_integer(types[name])):
                raise ValueError(f"ranges: {name!r} is not an integer of the signature")
            if low > high:
                raise ValueError(f"ranges[{name!r}]: expected low <= high, got {low} > {high}")

    @classmethod
    def make(
        cls,
        template: str,
        kernel: str,
        constants: Mapping[str, Constant],
        signature: Mapping[str, str] | Iterable[tuple[str, str]],
        *,
        divisible16: Iterable[str] = (),
        ranges: Mapping[str, tuple[int, int]] | None = None,
        **options: Any,
    ) -> KernelSpec:
        """Makes a canonical spec from plain dicts. options: the values of the remaining fields.
        Raises ValueError or TypeError if a field is invalid."""
        pairs = signature.items() if isinstance(signature, Mapping) else signature
        return cls(
            template=template,
            kernel=kernel,
            constants=tuple(sorted(constants.items())),
            signature=tuple(pairs),
            divisible16=tuple(sorted(set(divisible16))),
            ranges=tuple(sorted((n, low, high) for n, (low, high) in (ranges or {}).items())),
            **options,
        )

    # In Python, 1 == True == 1.0, but kernels with these constants differ. Therefore specs are
    # compared by their canonical text.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def module(self) -> str:
        """The dotted path of the template module."""
        return module_of(self.template)

    @cached_property
    def hash(self) -> str:
        """The sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name `<kernel>_<first 12 digits of the hash>`, a valid Python and PTX identifier."""
        return f"{self.kernel}_{self.hash[:12]}"

    def constant(self, name: str) -> Constant:
        """Returns the value of one constant. Raises KeyError, with the known names, if the name is
        unknown."""
        values = dict(self.constants)
        if name not in values:
            raise KeyError(f"{self.kernel} has no constant {name!r}; it has {sorted(values)}")
        return values[name]

    def to_json(self) -> str:
        """Returns canonical JSON: sorted keys, no spaces, floats in their shortest exact form."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Reads a spec that `to_json` wrote. Raises ValueError for unknown or missing fields."""
        data = json.loads(text)
        known = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != known:
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"kernel spec JSON: expected the fields {sorted(known)}, got {got}")
        data["constants"] = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in data["constants"]
        )
        for field_name in ("signature", "ranges"):
            data[field_name] = tuple(tuple(item) for item in data[field_name])
        data["divisible16"] = tuple(data["divisible16"])
        data["grid"] = None if data["grid"] is None else tuple(data["grid"])
        return cls(**data)
