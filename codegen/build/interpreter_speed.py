"""What Triton's interpreter makes anew at every operation, made once per launch.

An interpreted operation on a small block costs some 100 microseconds, nearly all of it spent on
the types of operands and results: shapes are unwrapped and checked, names formatted, tables of
dtypes built; and a sum of integers is a dozen further operations that look for an overflow and tell
nobody. Here, within a launch, types with equal element and shape share what they are made of,
tensors what follows from their type, and operations what becomes of operands of the same types.
What kernels compute, and what is refused, stays as it is.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value), with memories of their own: none outlives a launch."""
    overflow, operands = "binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl"
    return [
        (inspect, "getsourcelines", _read_once(inspect.getsourcelines)),
        (interpreter.FunctionRewriter, "_transform_ast", _transformed_in_place),
        (interpreter, "_patch_attr", _patch_directly),
        (TritonSemantic, operands, _kept_by_operands(getattr(TritonSemantic, operands))),
        (interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        (tl.dtype, "__eq__", _same_first(tl.dtype.__eq__)),
        (tl.block_type, "__init__", _kept_by_shape(tl.block_type.__init__)),
        (tl.tensor, "__init__", _kept_by_type(tl.tensor.__init__)),
        (TritonSemantic, overflow, _if_it_is_read(getattr(TritonSemantic, overflow))),
    ]


#: Function -> its lines and the number of the first, as `inspect.getsourcelines` gives them.
_LINES: WeakKeyDictionary[Callable, tuple[list[str], int]] = WeakKeyDictionary()


def remember_lines(kernel: Any) -> None:
    """Keeps the lines of a jit function, which Triton read when it was made."""
    if hasattr(kernel, "raw_src"):
        _LINES[kernel.fn] = kernel.raw_src, kernel.starting_line_number


def _read_once(original: Callable) -> Callable:
    """The lines of a function, which Triton reads twice where it prepares it."""
    known: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(original)
    def function(item: Any) -> Any:
        if inspect.isfunction(item) and item in _LINES:
            return _LINES[item]
        code = getattr(item, "__code__", None)
        if code is None:
            return original(item)
        if id(code) not in known:
            known[id(code)] = original(item), code
        return known[id(code)][0]

    return function


class _Located(interpreter.ASTTransformer):
    """Triton's changes of a function's tree, with lines for what they add."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        kept = node.value
        changed: ast.Assign = super().visit_Assign(node)
        added: list[ast.AST] = [changed.value]
        for new in added:  # grows
            if new is not kept:
                ast.copy_location(new, node)
                added += ast.iter_child_nodes(new)
        return changed


def _transformed_in_place(self: interpreter.FunctionRewriter, source: str) -> ast.AST:
    """The tree that is run in place of a function, parsed at its lines of the file: Triton walks
    over all of it twice to move it there."""
    tree = ast.parse("\n" * (self.def_file_lineno - 1) + source)
    return _Located().visit(tree)


def _kept_by_name(original: Callable) -> Callable:
    """numpy's dtype of a type, which hangs on nothing but its name."""
    known: dict[str, np.dtype] = {}

    @functools.wraps(original)
    def function(type_: Any) -> np.dtype:
        found = known.get(type_.name)
        if found is None:
            found = known[type_.name] = original(type_)
        return found

    return function


def _same_first(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, other: Any) -> bool:
        return self is other or original(self, other)

    return method


def _kept_by_shape(original: Callable) -> Callable:
    """What a block type is made of, by element and shape. A shape of anything but plain integers is
    unwrapped and checked as ever; one that is refused is not kept."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    @functools.wraps(original)
    def method(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if type(s) is tl.constexpr else s for s in shape]
        # What is kept holds the element, so that its id is no other's.
        key = (id(element_ty), *sizes)
        if {*map(type, sizes)} != {int}:
            original(self, element_ty, shape)
        elif key in known:
            self.__dict__.update(known[key])
        else:
            original(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    return method


def _kept_by_type(original: Callable) -> Callable:
    """Type, shape, size and dtype of a tensor; equal block types have one shape, see above."""
    known: dict[int, dict[str, Any]] = {}

    @functools.wraps(original)
    def method(self: Any, handle: Any, type: Any) -> None:
        key = id(type.__dict__.get("shape", type))
        if key in known:
            self.__dict__.update(known[key])
            self.handle = handle
        else:
            original(self, handle, type)
            known[key] = {k: v for k, v in self.__dict__.items() if k != "handle"}

    return method


#: Numbers that a launch keeps as blocks.
_MOST_NUMBERS = 256


def _kept_by_operands(original: Callable) -> Callable:
    """What two operands become, by their types: nothing, or a broadcast; and the block that a
    number becomes beside another one."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def number(self: TritonSemantic, lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> Any:
        first = isinstance(lhs, tl.tensor)
        held, value = (lhs, rhs) if first else (rhs, lhs)
        key = (_shared(held.type), first, type(value), value, *flags)
        if key in numbers:
            block, _ = numbers[key]
            return (held, block) if first else (block, held)
        made = original(self, lhs, rhs, *flags)
        kept, block = made if first else made[::-1]
        if kept is held:
            if len(numbers) >= _MOST_NUMBERS:
                numbers.clear()
            numbers[key] = block, held.type  # its id is no other's as long as it is held
        return made

    @functools.wraps(original)
    def method(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        tensors = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if named or not any(tensors):
            return original(self, lhs, rhs, *flags, **named)
        if not all(tensors):
            value = rhs if tensors[0] else lhs
            # Zeros of both signs are equal.
            if type(value) is int or (type(value) is float and value != 0):
                return number(self, lhs, rhs, flags)
            return original(self, lhs, rhs, *flags)
        key = (_shared(lhs.type), _shared(rhs.type), *flags)
        if key not in known:
            made = original(self, lhs, rhs, *flags)
            into = [_only_broadcast(was, now) for was, now in zip((lhs, rhs), made, strict=True)]
            known[key] = (*into, lhs.type, rhs.type)
            return made
        left, right, *_ = known[key]
        if left is _OTHERWISE or right is _OTHERWISE:
            return original(self, lhs, rhs, *flags)
        return _broadcast(self, lhs, left), _broadcast(self, rhs, right)

    return method


_OTHERWISE = object()


def _shared(type_: Any) -> int:
    """Equal of types that are equal: see `_kept_by_shape`."""
    return id(type_.__dict__.get("shape", type_))


def _only_broadcast(was: Any, now: Any) -> Any:
    """The type that a tensor is broadcast to; None where it stays."""
    if now is was:
        return None
    if not now.type.is_block() or now.type.scalar != was.type.scalar:
        return _OTHERWISE
    same_rank = not was.type.is_block() or len(was.type.shape) == len(now.type.shape)
    return now.type if same_rank else _OTHERWISE


def _broadcast(semantic: TritonSemantic, tensor: Any, type_: Any) -> Any:
    if type_ is None:
        return tensor
    if tensor.type.is_block():
        handle = semantic.builder.create_broadcast(tensor.handle, type_.shape)
    else:
        handle = semantic.builder.create_splat(type_, tensor.handle)
    return semantic.tensor(handle, type_)


def _patch_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language with the interpreter's semantic in place."""
    function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


def _if_it_is_read(original: Callable) -> Callable:
    """The search for an overflow ends in an assertion, which only debugging makes."""

    @functools.wraps(original)
    def method(self: TritonSemantic, *args: Any) -> None:
        if self.builder.options.debug:
            original(self, *args)

    return method
