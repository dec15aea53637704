"""Groups of arguments: what several arguments of an op say together, as one record.

An op's arguments are one flat record, which is its schema. A group is a view of some of them, under
names that are the same for every op that has such arguments:

    @dataclass(frozen=True)
    class MyArguments:
        x: torch.Tensor
        up_weight: torch.Tensor | None
        _: KW_ONLY
        up_scale: torch.Tensor | None = None
        weight_format: str = "dense"
        up = OptionalGroup(Weight, data="up_weight", scale="up_scale")

`a.up` is None where up_weight is, else the Weight of up_weight, up_scale and weight_format; a field
that the op has no argument for has the group's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, overload

T = TypeVar("T")
#: The argument that holds a group's first field; its fields; what reads these from a record.
Reader: TypeAlias = tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], tuple[Any, ...]]]


@dataclass(frozen=True)
class ArgumentGroup:
    """A group of arguments: a dataclass whose fields have defaults, but for what every op gives.

    names: the op's names of those fields that it calls otherwise; see `named`.
    """

    names: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def named(self, name: str) -> str:
        """What the op calls a field, as its errors say it."""
        return self.names.get(name, name)


class OptionalGroup(Generic[T]):
    """A group of an op's arguments as an attribute of their record; None where the first field of
    the group is None.

    kind: an ArgumentGroup. names: the op's names of the group's fields, where they differ.
    """

    def __init__(self, kind: type[T], **names: str) -> None:
        self._kind = kind
        self._names = MappingProxyType(names)
        self._readers: dict[type[Any], Reader] = {}

    @overload
    def __get__(self, a: None, owner: Any = None) -> OptionalGroup[T]: ...
    @overload
    def __get__(self, a: object, owner: Any = None) -> T | None: ...
    def __get__(self, a: Any, owner: Any = None) -> Any:
        return self if a is None else self._of(a)

    def _of(self, a: Any) -> T | None:
        record, there = type(a), vars(a)
        if record not in self._readers:
            self._readers[record] = _reader(record, self._kind, self._names)
        first, attributes, read = self._readers[record]
        if there[first] is None:
            return None
        # What the constructor of a frozen dataclass does, in a third of the time.
        made = self._kind.__new__(self._kind)
        vars(made).update(zip(attributes, read(there), strict=False), names=self._names)
        return made


class Group(OptionalGroup[T]):
    """An OptionalGroup that every call has."""

    @overload
    def __get__(self, a: None, owner: Any = None) -> Group[T]: ...
    @overload
    def __get__(self, a: object, owner: Any = None) -> T: ...
    def __get__(self, a: Any, owner: Any = None) -> Any:
        return self if a is None else self._of(a)


def _reader(record: type[Any], kind: type[Any], names: Mapping[str, str]) -> Reader:
    """Raises TypeError where a field has neither an argument nor a default, or a name stands for
    nothing."""
    given = {one.name for one in fields(record)}
    attributes = [one for one in fields(kind) if one.name != "names"]
    found: list[tuple[str | None, Any]] = []
    for one in attributes:
        name = names.get(one.name, one.name)
        if name not in given and (one.name in names or one.default is MISSING):
            raise TypeError(f"{record.__qualname__}: {kind.__qualname__} needs an argument {name}")
        found.append((name if name in given else None, one.default))
    if unknown := set(names).difference(one.name for one in attributes):
        raise TypeError(f"{kind.__qualname__}: no fields {sorted(unknown)}")
    (first, _), *_ = found
    assert first is not None
    return first, tuple(one.name for one in attributes), _read_all(found)


def _read_all(
    found: Sequence[tuple[str | None, Any]],
) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What reads arguments by name, or gives a default where there is no name."""
    if len(found) > 1 and all(name is not None for name, _ in found):
        return itemgetter(*(name for name, _ in found))
    return lambda there: tuple([default if n is None else there[n] for n, default in found])
