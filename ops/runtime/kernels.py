"""Launches of kernels by the names of their tensors, numbers and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.kernel import Kernel
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.runtime.operands import ALIGNMENT, operand_of
from tilewright.ops.runtime.program import Launch


def launch(
    kernel: Kernel,
    target: Target,
    grid: Sequence[int],
    values: Mapping[str, Any],
    *records: object,
    **constants: Constant,
) -> Launch:
    """A launch of `kernel`. Its spec is made once for calls that differ in nothing static.

    values: tensors (None for an absent one) and numbers by name; names that the kernel does not
        have are ignored. An Operand stands for a tensor that is put into the launch later. A number
        that is None is a constant.
    records, constants: those of `Kernel.spec`.

    Raises KeyError where a tensor or a number is missing, ValueError as `Kernel.spec` does.
    """
    given: dict[str, Any] = {}
    # What the spec is made of, in one flat tuple, which is hashed at each call. Python holds
    # 1 == True == 1.0, but they are different constants.
    key: list[Any] = [target.name, records, *constants, *constants.values()]
    key += map(type, constants.values())
    for parameter, name, dims, aligned, optional in kernel.pointers:
        value = given[parameter] = values.get(name) if optional else values[name]
        if value is None or value.__class__ is Operand:
            key.append(value)
            continue
        key.append(value.dtype)
        if aligned:
            key.append(value.data_ptr() % ALIGNMENT == 0)
        for dim in dims:
            key.append(value.stride(dim))
    for name, divisible in kernel.numbers.items():
        if name not in constants:
            value = given[name] = values[name]
            key.append(value if value is None else divisible and value % ALIGNMENT == 0)
    made = tuple(key)
    spec = kernel.specs.get(made)
    if spec is None:
        spec = kernel.specs[made] = _spec(kernel, target, given, records, constants)
    return Launch(spec, grid, given)


def _spec(
    kernel: Kernel,
    target: Target,
    given: Mapping[str, Any],
    records: Sequence[object],
    constants: Mapping[str, Constant],
) -> KernelSpec:
    operands: dict[str, Operand | None] = {}
    for parameter, name, dims, aligned, _ in kernel.pointers:
        value = given[parameter]
        if not isinstance(value, Operand):
            value = operand_of(value, *dims, aligned=aligned)
        operands[name] = value
    numbers = {name: given[name] for name in kernel.numbers if name in given}
    absent = {name: None for name, value in numbers.items() if value is None}
    divisible = [
        name
        for name, value in numbers.items()
        if kernel.numbers[name] and value is not None and value % ALIGNMENT == 0
    ]
    return kernel.spec(target.name, operands, {**constants, **absent}, records, divisible)
