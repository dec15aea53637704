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
that the op has no argument for has the group's default. An argument may hold a field of several
groups: of factor="factors[1]" the field is the argument's second element, None where that is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, overload

T = TypeVar("T")
#: The argument that holds a group's first field, and what makes its fields of a record's.
Reader: TypeAlias = tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]


@dataclass(frozen=True)
class ArgumentGroup:
    """A group of arguments: a dataclass whose fields have defaults, but for what every op gives.

    names: the op's names of those fields that it calls otherwise; see `named`.
    """

    names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def named(self, name: str) -> str:
        """What the op calls a field, as its errors say it."""
        return self.names.get(name, name)


class OptionalGroup(Generic[T]):
    """A group of an op's arguments as an attribute of their record; None where the first field of
    the group is None.

    kind: an ArgumentGroup. names: the op's names of the group's fields, where they differ.
    """

    _optional = True

    def __init__(self, kind: type[T], **names: str) -> None:
        # A class of its own for each group: what calls share need not be put into each of them.
        self._kind = type(kind.__name__, (kind,), {"names": MappingProxyType(names)})
        self._readers: dict[type[Any], Reader] = {}

    @property
    def text(self) -> tuple[str, str]:
        """The name of the group's class, and its docstring: what its fields mean."""
        (kind,) = self._kind.__bases__
        return kind.__name__, kind.__doc__ or ""

    @property
    def divided(self) -> frozenset[str]:
        """The op's arguments of which one element each is a field of the group."""
        names: Mapping[str, str] = self._kind.__dict__["names"]
        return frozenset(n.partition("[")[0] for n in names.values() if "[" in n)

    def arguments(self, group: T) -> dict[str, Any]:
        """The fields of a group, by the names of the op's arguments."""
        names: Mapping[str, str] = self._kind.__dict__["names"]
        return {names.get(field, field): value for field, value in vars(group).items()}

    @overload
    def __get__(self, a: None, owner: Any = None) -> OptionalGroup[T]: ...
    @overload
    def __get__(self, a: object, owner: Any = None) -> T | None: ...
    def __get__(self, a: Any, owner: Any = None) -> Any:
        if a is None:
            return self
        found = self._readers.get(type(a)) or self._new_reader(type(a))
        there = a.__dict__
        if self._optional and there[found[0]] is None:
            return None
        # What the constructor of a frozen dataclass does, in a quarter of the time.
        made: Any = object.__new__(self._kind)
        made.__dict__.update(found[1](there))
        return made

    def _new_reader(self, record: type[Any]) -> Reader:
        made = self._readers[record] = _reader(record, self._kind)
        return made


class Group(OptionalGroup[T]):
    """A group of an op's arguments that every call has, as an attribute of their record."""

    _optional = False

    if TYPE_CHECKING:

        @overload
        def __get__(self, a: None, owner: Any = None) -> Group[T]: ...
        @overload
        def __get__(self, a: object, owner: Any = None) -> T: ...
        def __get__(self, a: Any, owner: Any = None) -> Any: ...


def prefixed(prefix: str, kind: type[Any]) -> dict[str, str]:
    """Names of a group's fields that all begin with a prefix, as an op calls them."""
    return {one.name: prefix + one.name for one in fields(kind)}


def _reader(record: type[Any], kind: type[Any]) -> Reader:
    """Raises TypeError where a field has neither an argument nor a default, or a name stands for
    nothing."""
    given, names = {one.name for one in fields(record)}, kind.names
    found: dict[str, str] = {}
    for one in fields(kind):
        name = names.get(one.name, one.name)
        if name.partition("[")[0] in given:
            found[one.name] = name
        elif one.name in names or one.default is MISSING:
            raise TypeError(f"{record.__qualname__}: {kind.__qualname__} needs an argument {name}")
    if unknown := set(names).difference(one.name for one in fields(kind)):
        raise TypeError(f"{kind.__qualname__}: no fields {sorted(unknown)}")
    first = next(names.get(one.name, one.name) for one in fields(kind))
    # As dataclasses make a constructor: a call builds one dictionary, and loops over nothing.
    items = ", ".join(f"{field!r}: {_item(name)}" for field, name in found.items())
    return first, eval(f"lambda there: {{{items}}}")


def _item(name: str) -> str:
    argument, *place = name.partition("[")
    item = f"there[{argument!r}]"
    return f"{item} if {item} is None else {item}{''.join(place)}" if any(place) else item
