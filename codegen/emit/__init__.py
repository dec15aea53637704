"""Emits a KernelSpec as one standalone Triton file: the template with all static values filled in.

The emitted file imports only triton and says how it is compiled, so that a person or `worker.py`
can build the kernel without further information.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import textwrap
from functools import cache
from pathlib import Path

from tilewright.codegen.emit import gluon
from tilewright.codegen.emit import source as template_source
from tilewright.codegen.emit.evaluator import PartialEvaluator
from tilewright.codegen.emit.layout import unparse
from tilewright.codegen.emit.nodes import nodes_of
from tilewright.codegen.emit.source import EmitError, External, JitFunction, Library
from tilewright.codegen.emit.tidy import tidied
from tilewright.codegen.emit.values import DTYPES, TL, literal
from tilewright.codegen.spec import KernelSpec, is_integer


@cache
def emitter_fingerprint() -> str:
    """Returns the sha256 of the emitter's own sources, which is a part of every cache key."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (folder.parent / "spec.py", *sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_fingerprint(spec: KernelSpec) -> str:
    """Returns the sha256 of everything that the emitted text depends on: the spec, the emitter, the
    template, and the templates that this template imports."""
    parts = (spec.to_json(), emitter_fingerprint(), template_source.fingerprint(spec.module))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def emit(spec: KernelSpec) -> str:
    """Returns the standalone source of `spec`'s kernel. Equal specs and templates give equal texts.

    Raises EmitError if the template uses something that the emitter cannot translate exactly, if a
    static assertion fails, or if the spec's arguments differ from the kernel's parameters.
    """
    with template_source.ONE_THREAD:
        return _emit(spec)


def _emit(spec: KernelSpec) -> str:
    library = Library()
    module = library.load(spec.module)
    if spec.kernel not in module.functions:
        raise EmitError(
            f"{spec.module} has no @triton.jit function {spec.kernel!r}; "
            f"it has {sorted(module.functions)}"
        )
    function = JitFunction(module, module.functions[spec.kernel])
    if function.is_gluon:
        return "\n".join([*_preamble(spec, function, []), gluon.body(spec, function, library)])
    evaluator = PartialEvaluator(spec, library)
    parameters, body = evaluator.kernel(function)
    helpers = [_standalone(kept) for _, kept in sorted(evaluator.kept.items())]
    kernel = _function(spec, function, parameters, tidied(body, parameters))
    imports = _extra_imports(evaluator.externals)
    _check_names(spec, [*helpers, kernel], imports)
    return _assemble(spec, function, [*helpers, kernel], imports)


def _function(
    spec: KernelSpec, function: JitFunction, parameters: list[str], body: list[ast.stmt]
) -> ast.FunctionDef:
    typed = [ast.arg(name, _annotation(dict(spec.signature)[name])) for name in parameters]
    arguments = ast.arguments([], typed, None, [], [], None, [])
    docstring = ast.get_docstring(function.node, clean=True)
    first: list[ast.stmt] = [ast.Expr(ast.Constant(_indented(docstring)))] if docstring else []
    return ast.FunctionDef(spec.name, arguments, [*first, *(body or [ast.Pass()])], [_jit(spec)])


def _annotation(type_name: str) -> ast.expr | None:
    """Returns the annotation of a parameter. Integers are annotated with their declared width,
    because a JIT call would pass small values as 32-bit integers. Other parameters have no
    annotation."""
    return literal(External(f"{TL}.{DTYPES[type_name]}")) if is_integer(type_name) else None


def _jit(spec: KernelSpec) -> ast.expr:
    """Returns the decorator `@triton.jit`. Its do_not_specialize lists the integers; otherwise
    Triton would compile variants for their run-time values."""
    decorator = ast.Attribute(ast.Name("triton", ast.Load()), "jit", ast.Load())
    free = [n for n, type_ in spec.signature if is_integer(type_) and n not in spec.divisible16]
    if not free:
        return decorator
    names = ast.List([ast.Constant(name) for name in free], ast.Load())
    return ast.Call(decorator, [], [ast.keyword("do_not_specialize", names)])


def _indented(docstring: str) -> str:
    if "\n" not in docstring:
        return docstring
    return textwrap.indent(docstring, "    ").strip() + "\n    "


def _standalone(function: JitFunction) -> ast.FunctionDef:
    """Returns the definition of a function that the kernel passes to tl.reduce or to a similar
    function. Raises EmitError if the function reads anything but its arguments."""
    node = function.node
    known = {arg.arg for arg in node.args.args} | {"tl"} | set(dir(builtins))
    known |= {n.id for n in nodes_of(node) if isinstance(n, ast.Name) and _is_store(n)}
    bodies = ast.Module(node.body, [])
    free = {n.id for n in nodes_of(bodies) if isinstance(n, ast.Name)} - known
    if free:
        raise EmitError(f"{function} is passed as an argument: it must not read {sorted(free)}")
    decorator = ast.Attribute(ast.Name("triton", ast.Load()), "jit", ast.Load())
    return ast.FunctionDef(node.name, node.args, node.body, [decorator])


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _extra_imports(externals: set[str]) -> list[str]:
    """Returns the imports for modules below triton.language.extra, such as libdevice."""
    modules = {
        path.rpartition(".")[0] for path in externals if path.startswith("triton.language.extra.")
    }
    lines = {
        "from {} import {}".format(*module.rpartition(".")[::2])
        for module in modules
        if module != "triton.language.extra"
    }
    names = [line.rsplit(" ", 1)[1] for line in lines]
    if len(set(names)) != len(names):
        raise EmitError(f"two modules of the same name are imported: {sorted(lines)}")
    return sorted(lines)


def _assemble(
    spec: KernelSpec, function: JitFunction, nodes: list[ast.FunctionDef], imports: list[str]
) -> str:
    lines = _preamble(spec, function, ["import triton", "import triton.language as tl", *imports])
    for node in nodes:
        lines += ["", "", unparse(node)]
    return "\n".join(lines) + "\n"


def _preamble(spec: KernelSpec, function: JitFunction, imports: list[str]) -> list[str]:
    """Returns the first lines of an emitted file, which say how to compile the file."""
    return [
        f'"""{_header(spec, function)}"""',
        "",
        *([*imports, ""] if imports else []),
        f"KERNEL = {_quoted(spec.name)}",
        "SIGNATURE = {",
        *(f"    {_quoted(name)}: {_quoted(type_)}," for name, type_ in spec.signature),
        "}",
        "DIVISIBLE16 = [",
        *(f"    {_quoted(name)}," for name in spec.divisible16),
        "]",
        f"NUM_WARPS = {spec.num_warps}",
        f"NUM_STAGES = {spec.num_stages}",
        f"MAXNREG = {spec.maxnreg}",
        f"LAUNCH_PDL = {spec.launch_pdl}",
        f"TARGET = {_quoted(spec.target)}",
    ]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _header(spec: KernelSpec, function: JitFunction) -> str:
    docstring = ast.get_docstring(function.node, clean=True) or spec.kernel
    what = docstring.strip().split("\n\n")[0].replace("\\", "\\\\").replace('"""', "'''")
    constants = ", ".join(f"{name}={value!r}" for name, value in spec.constants)
    facts = [f"{name} % 16 == 0" for name in spec.divisible16]
    facts += [f"{low} <= {name} <= {high}" for name, low, high in spec.ranges]
    grid = f"\nLaunch grid: {spec.grid}." if spec.grid else ""
    promised = f"\n\nThe caller promises: {', '.join(facts)}." if facts else ""
    digest = template_source.fingerprint(spec.module)
    paragraphs = (
        f"{what}\n\n"
        f"Emitted for {spec.target} from {spec.module}.{spec.kernel}, "
        f"template sha256 {digest[:16]}, emitter sha256 {emitter_fingerprint()[:16]}.{grid}\n\n"
        f"Constants: {constants}.{promised}\n"
    )
    return "\n".join(
        line if len(line) <= 100 else textwrap.fill(line, 100, subsequent_indent="    ")
        for line in paragraphs.split("\n")
    )


def _check_names(spec: KernelSpec, functions: list[ast.FunctionDef], imports: list[str]) -> None:
    """Checks that the file defines every name that it reads. Raises EmitError if it does not."""
    defined = {*dir(builtins), "triton", "tl", *(line.rsplit(" ", 1)[1] for line in imports)}
    defined |= {node.name for node in functions}
    for function in functions:
        local = {arg.arg for arg in function.args.args}
        names = [node for node in nodes_of(function) if isinstance(node, ast.Name)]
        local |= {node.id for node in names if _is_store(node)}
        clash = local & {node.name for node in functions}
        missing = {node.id for node in names} - local - defined
        if missing or clash:
            raise EmitError(
                f"{spec.name}: the emitted file would not stand alone: "
                f"undefined {sorted(missing)}, defined twice {sorted(clash)}"
            )
