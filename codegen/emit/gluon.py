"""Emits a kernel that is written in Gluon. The emitted file has the template's text, and a kernel
without constexpr parameters.

The partial evaluator knows Triton's language, but not Gluon's. Therefore the template's text is
unchanged. The emitted kernel calls the template's function with the constants of the spec, and
Gluon's compiler inlines the call. Functions that the template imports from Triton templates are
unchanged, too. They may contain only elementwise computations.
"""

from __future__ import annotations

import ast

from tilewright.codegen.emit.source import EmitError, JitFunction, Library, TemplateModule
from tilewright.codegen.spec import KernelSpec


def body(spec: KernelSpec, function: JitFunction, library: Library) -> str:
    """Returns the text of an emitted file, except its first lines.

    Raises EmitError if an imported template contains anything but functions, or if the spec's
    arguments differ from the kernel's parameters.
    """
    _check_arguments(spec, function)
    own, *others = library.closure(function.module.name)
    imported = [_functions(module) for module in others]
    return "\n".join(["", _text(own), *imported, "", *_kernel(spec), ""])


def _check_arguments(spec: KernelSpec, function: JitFunction) -> None:
    arguments = function.node.args
    names = [argument.arg for argument in arguments.args]
    given = {name for name, _ in (*spec.signature, *spec.constants)}
    needed = names[: len(names) - len(arguments.defaults)]
    unknown, missing = sorted(given - set(names)), [name for name in needed if name not in given]
    if unknown or missing:
        raise EmitError(f"{function}: unknown arguments {unknown}, missing arguments {missing}")


def _functions(module: TemplateModule) -> str:
    """Returns the functions of an imported Triton template, and its imports of Triton."""
    if module.constants:
        raise EmitError(
            f"{module.name}: a Gluon template must not import {sorted(module.constants)}"
        )
    return f"\n\n{_text(module)}"


def _text(module: TemplateModule) -> str:
    """Returns a template's text without its docstring and its imports of other templates."""
    nodes = [node for node in ast.parse(module.text).body if _is_docstring(node) or _is_local(node)]
    gone = {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = module.text.rstrip().split("\n")
    return "\n".join(text for line, text in enumerate(lines, 1) if line not in gone).strip()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_local(node: ast.stmt) -> bool:
    """Whether a statement imports from another template."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "triton"


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
