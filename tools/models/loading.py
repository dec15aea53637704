"""Loads the model of a command from a user's function.

This module does not import torch, so that a wrong name is reported at once.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tilewright.tools.models.user_errors import one_line


class ModelError(ValueError):
    """Raised for a MODEL that cannot be loaded. The message says why, and what is expected."""


class LoadedModel(NamedTuple):
    """A model and its arguments. Call it as `model(*args, **kwargs)`."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def place_of(spec: str) -> tuple[str, str]:
    """Splits a spec at its last colon into (module or file.py, function). Without a colon, the
    first part is empty. Raises ModelError, which lists the functions of a file, for a file without
    a function."""
    place, _, function = spec.rpartition(":")
    if (file := spec.removesuffix(":")).endswith(".py"):
        found = _functions(import_place(file))
        raise ModelError(f"{spec}: expected {file}:function; {found}")
    return place, function


def load_function(
    spec: str, place: str, function_name: str, options: Mapping[str, Any]
) -> LoadedModel:
    """Returns the model that a function of a user's module returns. `options` are keyword arguments
    of that function. Raises ModelError."""
    module = import_place(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "is not callable" if hasattr(module, function_name) else "is not there"
        raise ModelError(f"{spec}: {function_name} {what} in {place}; {_functions(module)}")
    return _checked(spec, _call(spec, function, options))


def import_place(place: str) -> ModuleType:
    """Imports and returns a user's file.py or module, which may register patterns. Raises
    ModelError."""
    return _import_file(place) if place.endswith(".py") else _import_module(place)


def _import_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise ModelError(f"{place}: no such file (from {Path.cwd()})")
    # The imported module gets a unique name, so that a user's torch.py or llama.py does not hide
    # another module.
    spec = importlib.util.spec_from_file_location(f"tilewright_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{place}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _put_on_path(path.parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _failed(f"importing {place}", error) from error
    return module


def _import_module(place: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise _failed(f"importing {place}", error) from error


def _put_on_path(folder: Path) -> None:
    """Lets the user's modules import their neighbours, as `python file.py` and `python -m` do."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _failed(doing: str, error: Exception) -> ModelError:
    return ModelError(f"{doing} failed: {one_line(error)}")


def _functions(module: ModuleType) -> str:
    """Lists the functions of a user's module. Functions that look like a MODEL come first."""
    found = [
        (name, value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    names = [name for name, _ in sorted(found, key=lambda one: (_unlike_a_model(one[1]), one[0]))]
    return f"it defines {', '.join(names)}" if names else "it defines no function"


def _unlike_a_model(function: Callable[..., Any]) -> int:
    """Returns a number that sorts functions: 0 for a function that takes no arguments and whose
    source returns three values, 1 if it returns the result of a call, and 2 for any other
    function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        inspect.signature(function).bind()
    except (OSError, SyntaxError, TypeError):
        return 2
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    if any(isinstance(value, ast.Tuple) and len(value.elts) == 3 for value in returned):
        return 0
    return 1 if any(isinstance(value, ast.Call) for value in returned) else 2


def _call(spec: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no arguments"
        raise ModelError(f"{spec}{signature} cannot be called with {given}: {error}") from error
    try:
        return function(**options)
    except Exception as error:
        raise _failed(f"calling {spec}", error) from error


def _checked(spec: str, result: Any) -> LoadedModel:
    expected = f"{spec}: expected (model, args, kwargs)"
    if not isinstance(result, tuple) or len(result) != 3:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise ModelError(f"{expected}, got {type(result).__name__}{size}")
    model, args, kwargs = result
    if not callable(model):
        raise ModelError(f"{expected}; model: expected a callable, got {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise ModelError(f"{expected}; args: expected a tuple or list, got {type(args).__name__}")
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise ModelError(
            f"{expected}; kwargs: expected a dict with names as keys, got {type(kwargs).__name__}"
        )
    return LoadedModel(model, tuple(args), kwargs)
