"""Makes the schema of an op from the dataclass of its arguments.

`torch.library.infer_schema` does not suffice: it reads a function, supports only SymInt for
integers, and does not support lists as defaults.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from inspect import get_annotations
from string import ascii_lowercase
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import torch

#: A tensor that the op writes. In the schema, it is `Tensor(a!)`.
Written: TypeAlias = Annotated[torch.Tensor, "written"]
#: An integer that may be symbolic in the caller's graph. An `int`, in contrast, is a constant of
#: the graph.
SymInt: TypeAlias = Annotated[int, "symbolic"]

_WORDS = {
    torch.Tensor: "Tensor",
    int: "int",
    SymInt: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
}


def schema_of(arguments: type[Any], returns: str) -> str:
    """Returns the schema whose arguments are the fields of a dataclass, in the order of its
    constructor: "(Tensor x, Tensor(a!) cache, *, float eps=1e-06) -> Tensor".

    The type of a field may be Tensor, Written, int, SymInt, float, bool, str, torch.dtype or
    torch.device. It may also be one of these types `| None`, or a Sequence or list of one of them,
    whose default is a tuple. Raises ValueError, with the name of the field, for any other field.
    returns: the result, as it is written in the schema.
    """
    # typing.get_type_hints does not accept KW_ONLY before Python 3.11.
    hints = ChainMap(*(get_annotations(owner, eval_str=True) for owner in arguments.__mro__))
    letters = iter(ascii_lowercase)
    words: list[str] = []
    for field in ordered_fields(arguments):
        if field.kw_only and "*" not in words:
            words.append("*")
        try:
            words.append(f"{_type(hints[field.name], letters)} {field.name}{_default(field)}")
        except ValueError as error:
            raise ValueError(f"{arguments.__qualname__}.{field.name}: {error}") from None
    return f"({', '.join(words)}) -> {returns}"


def ordered_fields(arguments: type[Any]) -> list[Field[Any]]:
    """Returns the fields of a dataclass in the order of an op's arguments. Keyword-only fields come
    last. Among them, inherited fields come first."""
    return sorted(fields(arguments), key=lambda field: field.kw_only is True)


def _type(hint: Any, letters: Iterator[str]) -> str:
    """Returns the schema type of a type hint. letters: the alias sets that are not used yet."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        return _type(inner[inner[0] is NoneType], letters) + "?"
    if origin in (Sequence, list):
        return _type(inner[0], letters) + "[]"
    if hint == Written:
        return f"Tensor({next(letters)}!)"
    if hint not in _WORDS:
        raise ValueError(f"expected a type that schema_of knows, got {hint}")
    return _WORDS[hint]


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        raise ValueError("expected a tuple as the default of a list, got a default_factory")
    return "" if field.default is MISSING else f"={_literal(field.default)}"


def _literal(default: Any) -> str:
    if isinstance(default, tuple):
        return f"[{', '.join(map(_literal, default))}]"
    return f'"{default}"' if isinstance(default, str) else str(default)
