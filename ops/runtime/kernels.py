"""Launches of kernels, from tensors, numbers and constants that are given by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.kernel import Kernel
from tilewright.codegen.operand import ALIGNMENT, Operand
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.runtime.operands import operand_of
from tilewright.ops.runtime.program import Launch


def launch(
    kernel: Kernel,
    target: Target,
    grid: Sequence[int],
    values: Mapping[str, Any],
    *records: object,
    **constants: Constant,
) -> Launch:
    """Returns a launch of `kernel`. Calls with the same static data share one spec.

    Args:
        values: Tensors (None for an absent tensor) and numbers by name. Names that the kernel does
            not have are ignored, and the kernel's `launch_strides` are read from the tensors. An
            Operand is a placeholder for a tensor that is put into the launch later. A number that
            is None becomes a constant of the kernel.
        records, constants: As in `Kernel.spec`.

    Raises KeyError if a tensor or a number is missing, and ValueError in the same cases as
    `Kernel.spec`.
    """
    given: dict[str, Any] = {}
    # The key of the spec is one flat tuple, which is hashed at each call. It includes types: 1 ==
    # True == 1.0 in Python, but these are different constants.
    key: list[Any] = [target.name, records]
    if constants:
        key += [*constants, *constants.values(), *map(type, constants.values())]
    add = key.append
    for parameter, name, dims, aligned, optional in kernel.pointers:
        value = given[parameter] = values.get(name) if optional else values[name]
        if value is None or value.__class__ is Operand:
            add(value)
            continue
        add(value.dtype)
        if aligned:
            add(value.data_ptr() % ALIGNMENT == 0)
        for dim in dims:
            add(value.stride(dim))
    for name, divisible, stride in kernel.numbers:
        if name not in constants:
            value = values[name] if stride is None else _launch_stride(kernel, values, *stride)
            given[name] = value
            if value is None:
                add(name)
            elif divisible:
                add(value % ALIGNMENT == 0)
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
    known, divisible = dict(constants), []
    for number in kernel.numbers:
        name = number.name
        if name not in constants:
            if given[name] is None:
                known[name] = None
            elif number.divisible and given[name] % ALIGNMENT == 0:
                divisible.append(name)
    return kernel.spec(target.name, operands, known, records, divisible)


def _launch_stride(kernel: Kernel, values: Mapping[str, Any], name: str, dim: int) -> int:
    """Returns a tensor's stride for `Kernel.launch_strides`. Returns 0 if the dimension does not
    exist or is broadcast."""
    tensor = values[name]
    if tensor is None or not -tensor.dim() <= dim < tensor.dim():
        return 0
    if name in kernel.broadcast and tensor.shape[dim] <= 1:
        return 0
    stride: int = tensor.stride(dim)
    return stride
