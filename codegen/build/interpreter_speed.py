"""Caches that make Triton's interpreter faster. Each cache lives for one launch.

An interpreted operation on a small block takes about 100 microseconds. Nearly all of this time is
spent on the types of operands and results: Triton unwraps and checks shapes, formats names and
builds tables of dtypes. For a sum of integers, Triton adds a dozen operations that search for an
overflow, even if nothing reports the overflow.

The replacements in this file cache the attributes of a block type by element and shape, the
attributes of a tensor by type, and the broadcasts of operands by their types. They change neither
the results of kernels nor the errors that Triton raises.
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
    """Returns the replacements as (owner, attribute, value). Each call returns new caches, so that
    no cache outlives a launch."""
    overflow, operands = "binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl"
    return [
        (inspect, "getsourcelines", _read_once(inspect.getsourcelines)),
        (interpreter.FunctionRewriter, "_transform_ast", _transformed_in_place),
        (interpreter, "_patch_builtin", _patch_listed),
        (interpreter, "_patch_attr", _patch_directly),
        (TritonSemantic, operands, _kept_by_operands(getattr(TritonSemantic, operands))),
        (interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        (tl.dtype, "__eq__", _same_first(tl.dtype.__eq__)),
        (tl.block_type, "__init__", _kept_by_shape(tl.block_type.__init__)),
        (tl.tensor, "__init__", _kept_by_type(tl.tensor.__init__)),
        (TritonSemantic, overflow, _if_it_is_read(getattr(TritonSemantic, overflow))),
        (interpreter.InterpreterBuilder, "create_expand_dims", _expanded),
    ]


#: Maps a function to (its source lines, the number of the first line), as `inspect.getsourcelines`
#: returns them.
_LINES: WeakKeyDictionary[Callable, tuple[list[str], int]] = WeakKeyDictionary()


def remember_lines(kernel: Any) -> None:
    """Stores the source lines of a jit function. Triton read them when it made the function."""
    if hasattr(kernel, "raw_src"):
        _LINES[kernel.fn] = kernel.raw_src, kernel.starting_line_number


def _read_once(original: Callable) -> Callable:
    """Wraps `inspect.getsourcelines` with a cache. Without it, Triton reads the lines of a function
    twice when it prepares the function."""
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
    """Transforms a function's syntax tree as Triton does, and gives line numbers to the added
    nodes."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        kept = node.value
        changed: ast.Assign = super().visit_Assign(node)
        added: list[ast.AST] = [changed.value]
        for new in added:  # the list grows during the loop
            if new is not kept:
                ast.copy_location(new, node)
                added += ast.iter_child_nodes(new)
        return changed


def _transformed_in_place(self: interpreter.FunctionRewriter, source: str) -> ast.AST:
    """Replaces `_transform_ast` by a function that parses a jit function at its line numbers in the
    file. Triton's own method parses the function at line 1, and walks over the whole tree twice to
    correct the line numbers."""
    tree = ast.parse("\n" * (self.def_file_lineno - 1) + source)
    return _Located().visit(tree)


def _kept_by_name(original: Callable) -> Callable:
    """Caches the numpy dtype of a type, which depends only on the type's name."""
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
    """Caches the attributes of a block type, by element and shape. It does not cache a shape that
    has anything but plain integers, or a shape that Triton refuses."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    @functools.wraps(original)
    def method(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if type(s) is tl.constexpr else s for s in shape]
        # The cached attributes refer to the element type, so its id stays unique.
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
    """Caches the attributes of a tensor by its type. Equal block types share one shape object (see
    `_kept_by_shape`), and this object is the key."""
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


#: A launch caches only blocks that have at most this many numbers.
_MOST_NUMBERS = 256


def _kept_by_operands(original: Callable) -> Callable:
    """Caches how operands are converted. For two tensors, the cache stores, under the types of
    both, whether each tensor is broadcast. For a number and a tensor, the cache stores the block
    that the number becomes."""
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
            # The entry keeps the type alive, so the type's id stays unique.
            numbers[key] = block, held.type
        return made

    @functools.wraps(original)
    def method(self: TritonSemantic, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        tensors = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if named or not any(tensors):
            return original(self, lhs, rhs, *flags, **named)
        if not all(tensors):
            value = rhs if tensors[0] else lhs
            # 0.0 and -0.0 are equal as keys, so a zero is not cached.
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
    """Returns a key that is the same for equal types (see `_kept_by_shape`)."""
    return id(type_.__dict__.get("shape", type_))


def _only_broadcast(was: Any, now: Any) -> Any:
    """Returns the type that a tensor is broadcast to; None if the tensor stays as it is, and
    _OTHERWISE for any other conversion."""
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


@functools.cache
def _builtins(owner: Any) -> tuple[str, ...]:
    """Returns the names of the builtins of a module or class, which are read before the owner is
    patched."""
    return tuple(name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def _patch_listed(owner: Any, builder: Any, scope: Any) -> None:
    """Replaces `_patch_builtin`: reads the members of a module or class once, not at each launch. A
    class that is a member of two modules is patched for the first module only."""
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


def _patch_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces `_patch_attr` of Triton's interpreter, which binds a function of `triton.language`
    to the interpreter's semantic."""
    function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


def _if_it_is_read(original: Callable) -> Callable:
    """Skips Triton's search for overflows unless debugging is on. Without debugging, nothing uses
    the result of the search."""

    @functools.wraps(original)
    def method(self: TritonSemantic, *args: Any) -> None:
        if self.builder.options.debug:
            original(self, *args)

    return method


def _expanded(self: interpreter.InterpreterBuilder, arg: Any, axis: int) -> Any:
    """Replaces `create_expand_dims`. `np.expand_dims` takes several times as long as a reshape."""
    shape = arg.data.shape
    axis += (len(shape) + 1) * (axis < 0)
    data = arg.data.reshape(*shape[:axis], 1, *shape[axis:])
    return interpreter.TensorHandle(data, arg.dtype.scalar)
