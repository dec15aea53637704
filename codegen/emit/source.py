"""Reads templates as text: their jit functions, constants and imports, without importing them.

Therefore an emitted file always belongs to the text that was hashed, even if a template was edited
after the process imported it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# CPython 3.11 miscounts the recursion depth if two threads build syntax trees at the same time
# (python/cpython#106905).
ONE_THREAD = threading.RLock()


class EmitError(ValueError):
    """Raised when a template uses something that the emitter cannot translate exactly. Nothing is
    emitted in this case."""


@dataclass(frozen=True)
class JitFunction:
    """One `@triton.jit` or `@gluon.jit` function of a template module."""

    module: TemplateModule
    node: ast.FunctionDef

    @property
    def is_gluon(self) -> bool:
        return "gluon.jit" in _decorators(self.node)

    @property
    def name(self) -> str:
        return self.node.name

    def __repr__(self) -> str:
        return f"{self.module.name}.{self.name}"


@dataclass(frozen=True)
class External:
    """An object of triton or of the math module, identified by its full dotted path."""

    path: str


@dataclass(frozen=True)
class Imported:
    """A name that a template imports from another template module."""

    module: str
    name: str


@dataclass(frozen=True)
class ModuleConstant:
    """An assignment at module level."""

    module: TemplateModule
    expression: ast.expr


@dataclass(frozen=True, eq=False)
class TemplateModule:
    """The parsed text of one template module."""

    name: str
    text: str
    functions: dict[str, ast.FunctionDef]
    constants: dict[str, ast.expr]
    imports: dict[str, External | Imported]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Library:
    """The template modules that are read to emit one kernel. Each module is read once, when it is
    first needed."""

    def __init__(self) -> None:
        self._modules: dict[str, TemplateModule] = {}

    def load(self, name: str) -> TemplateModule:
        """Parses a module by its dotted name. Raises EmitError if there is no such module."""
        if name not in self._modules:
            self._modules[name] = parse_module(name, find_module(name).read_text("utf-8"))
        return self._modules[name]

    def lookup(
        self, module: TemplateModule, name: str
    ) -> JitFunction | External | ModuleConstant | None:
        """Returns the meaning of a global name inside `module`; None if it is not defined there."""
        if name in module.functions:
            return JitFunction(module, module.functions[name])
        if name in module.constants:
            return ModuleConstant(module, module.constants[name])
        imported = module.imports.get(name)
        if isinstance(imported, Imported):
            return self.lookup(self.load(imported.module), imported.name)
        return imported

    def closure(self, name: str) -> list[TemplateModule]:
        """Returns a module and all template modules that it imports, directly or indirectly. The
        module itself comes first. The other modules are sorted by name."""
        first = self.load(name)
        seen = {name: first}
        waiting = [first]
        while waiting:
            for imported in waiting.pop().imports.values():
                if isinstance(imported, Imported) and imported.module not in seen:
                    seen[imported.module] = self.load(imported.module)
                    waiting.append(seen[imported.module])
        return [first, *(seen[key] for key in sorted(seen) if key != name)]


def find_module(name: str) -> Path:
    """Returns the file of a template module. Raises EmitError if there is no such module."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise EmitError(f"template {name}: there is no such module ({error})") from error
    if found is None or found.origin is None:
        raise EmitError(f"template {name}: there is no such module")
    return Path(found.origin)


def fingerprint(name: str) -> str:
    """Returns the sha256 of the texts of a template module and of all templates that it imports."""
    digest = hashlib.sha256()
    for module in Library().closure(name):
        digest.update(f"{module.name} {module.digest}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)  # every emission reads its templates again, but parses only changed texts
def parse_module(name: str, text: str) -> TemplateModule:
    """Collects the jit functions, the constants, and the imports of triton and of other templates
    from a module's text.

    The result is cached by name and text, so callers must not change its trees. Raises EmitError if
    the text is not valid Python.
    """
    try:
        with ONE_THREAD:
            tree = ast.parse(text)
    except SyntaxError as error:
        raise EmitError(f"template {name}: {error}") from error
    module = TemplateModule(name, text, {}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_jit(node):
            module.functions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            module.constants[node.target.id] = node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module.imports.update(_imports(name, node))
    return module


def _is_jit(node: ast.FunctionDef) -> bool:
    return any(name in ("triton.jit", "jit", "gluon.jit") for name in _decorators(node))


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]


def _imports(module: str, node: ast.Import | ast.ImportFrom) -> dict[str, External | Imported]:
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: External(
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            for alias in node.names
            if alias.name.split(".")[0] in ("triton", "math")
        }
    source = node.module or ""
    if node.level:
        parents = module.split(".")[: -node.level]
        source = ".".join([*parents, source] if source else parents)
    if source.split(".")[0] in ("triton", "math"):
        return {a.asname or a.name: External(f"{source}.{a.name}") for a in node.names}
    package = module.rpartition(".")[0]
    sibling = package and source.rpartition(".")[0] == package
    if sibling or "templates" in source.split("."):  # another template
        return {a.asname or a.name: Imported(source, a.name) for a in node.names}
    return {}
