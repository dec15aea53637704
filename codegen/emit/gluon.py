"""Emits a kernel that is written in Gluon: its template's text, and a kernel without constants.

The partial evaluator knows Triton's language, not Gluon's. The template therefore stays as it is,
and the emitted kernel calls its function with the constants of the spec; Gluon's compiler inlines
the call. A Gluon template imports nothing but Triton.
"""

from __future__ import annotations

import ast

from tilewright.codegen.emit.source import EmitError, Imported, JitFunction
from tilewright.codegen.spec import KernelSpec


def body(spec: KernelSpec, function: JitFunction) -> str:
    """Returns the text of an emitted file after its first lines. Raises EmitError if the template
    imports another one, or if the spec's arguments differ from the kernel's."""
    others = {one.module for one in function.module.imports.values() if isinstance(one, Imported)}
    if others:
        raise EmitError(f"{function}: a Gluon template must not import {sorted(others)}")
    _check_arguments(spec, function)
    return "\n".join(["", _without_docstring(function), "", *_kernel(spec), ""])


def _check_arguments(spec: KernelSpec, function: JitFunction) -> None:
    arguments = function.node.args
    names = [argument.arg for argument in arguments.args]
    given = {name for name, _ in (*spec.signature, *spec.constants)}
    needed = names[: len(names) - len(arguments.defaults)]
    unknown, missing = sorted(given - set(names)), [name for name in needed if name not in given]
    if unknown or missing:
        raise EmitError(f"{function}: unknown arguments {unknown}, missing arguments {missing}")


def _without_docstring(function: JitFunction) -> str:
    """Returns the template's text behind its docstring."""
    lines = function.module.text.rstrip().split("\n")
    first = ast.parse(function.module.text).body[0]
    described = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(lines[first.end_lineno or 0 :] if described else lines).strip()


def _kernel(spec: KernelSpec) -> list[str]:
    """Returns the lines of the kernel, which has the parameters of the spec's signature."""
    parameters = [name for name, _ in spec.signature]
    passed = [f"{name}={name}" for name in parameters]
    passed += [f"{name}={value!r}" for name, value in spec.constants]
    numbers = [name for name, type_ in spec.signature if not type_.startswith("*")]
    return [
        "",
        f"@gluon.jit(do_not_specialize={numbers!r})",
        f"def {spec.name}({', '.join(parameters)}):",
        f"    {spec.kernel}(",
        *(f"        {argument}," for argument in passed),
        "    )",
    ]
