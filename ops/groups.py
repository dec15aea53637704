"""Groups of arguments: several arguments of an op that belong together, as one record.

The arguments of an op are one flat record, which determines its schema. A group is a view of some
of these arguments. All ops that have such arguments use the same names in the view:

    @dataclass(frozen=True)
    class MyArguments:
        x: torch.Tensor
        up_weight: torch.Tensor | None
        _: KW_ONLY
        up_scale: torch.Tensor | None = None
        weight_format: str = "dense"
        up = OptionalGroup(Weight, data="up_weight", scale="up_scale")

`a.up` is None if up_weight is None. Otherwise, it is the Weight of up_weight, up_scale and
weight_format. If the op has no argument for a field, the field has the group's default. One
argument may hold a field of several groups: with factor="factors[1]", the field is the second
element of the argument `factors`, or None if that argument is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, overload

T = TypeVar("T")
#: A pair of the name of the argument that is the first field of a group, and a function that
#: computes the group's fields from the fields of a record.
Reader: TypeAlias = tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]


@dataclass(frozen=True)
class ArgumentGroup:
    """The base class of groups of arguments, which are dataclasses. A field has a default unless
    all ops with this group have an argument for the field.

    names: maps a field to the op's argument, for fields that the op names differently; see `named`.
    """

    names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def named(self, name: str) -> str:
        """Returns the name of the op's argument for a field. Error messages use it."""
        return self.names.get(name, name)


class OptionalGroup(Generic[T]):
    """A group of an op's arguments, as an attribute of their record. The attribute is None if the
    group's first field is None.

    kind: an ArgumentGroup. names: the names of the op's arguments for fields of the group, if they
    differ.
    """

    _optional = True

    def __init__(self, kind: type[T], **names: str) -> None:
        # Each group gets its own class. The class has the data that all calls share, so that the
        # instances need not have copies of it.
        self._kind = type(kind.__name__, (kind,), {"names": MappingProxyType(names)})
        self._readers: dict[type[Any], Reader] = {}

    @property
    def text(self) -> tuple[str, str]:
        """The name and the docstring of the group's class. The docstring explains the fields."""
        (kind,) = self._kind.__bases__
        return kind.__name__, kind.__doc__ or ""

    @property
    def divided(self) -> frozenset[str]:
        """The op's arguments whose elements are fields of groups, such as `factors` in the example
        of this module."""
        names: Mapping[str, str] = self._kind.__dict__["names"]
        return frozenset(n.partition("[")[0] for n in names.values() if "[" in n)

    def arguments(self, group: T) -> dict[str, Any]:
        """Returns the fields of a group, by the names of the op's arguments."""
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
        # This replaces the constructor of a frozen dataclass, and takes a quarter of its time.
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
    """Maps each field of a group to the name of an op's argument: the prefix, followed by the
    field's name."""
    return {one.name: prefix + one.name for one in fields(kind)}


def _reader(record: type[Any], kind: type[Any]) -> Reader:
    """Makes a group's Reader for a record. Raises TypeError if a field has neither an argument nor
    a default, or if a name belongs to no field."""
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
    # Generate code without a loop, as dataclasses do for constructors: a call builds only one
    # dictionary.
    items = ", ".join(f"{field!r}: {_item(name)}" for field, name in found.items())
    return first, eval(f"lambda there: {{{items}}}")


def _item(name: str) -> str:
    argument, *place = name.partition("[")
    item = f"there[{argument!r}]"
    return f"{item} if {item} is None else {item}{''.join(place)}" if any(place) else item
