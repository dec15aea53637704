"""Replays the programs of an interpreted launch, so that Triton's interpreter handles each
operation of the language once for a launch, not once for a program.

Most of the time of an interpreted program is spent on types: Triton unwraps, checks and broadcasts
the operands of each operation, before a method of Triton's `InterpreterBuilder` computes the result
with numpy. All programs of a launch have the same types. The first program is recorded: the
recording lists its calls of the builder, and which results are operands of which calls. For the
other programs, only these calls are made. Calls whose operands are the same for all programs are
made once.

A program may depend on numbers, for example in `if` or `range`. The recorder notices if the
kernel's Python code reads the number in a tensor, other than by a call of the builder. The replay
of another program compares this number with the recorded one. If the numbers differ, that program
is run from its beginning and recorded as another branch. In this run, the calls that the replay has
already made are not made again, but return their earlier results, so that each call writes to
memory once.

A launch is not replayed if the Python code of a program reads a whole block, if a call has an
operand of an unknown kind, or if the results of a program take too much memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

# The types of the results of calls, and of the operands that are not constants. Triton 3.8 has no
# block pointers.
_HANDLES: tuple[type, ...] = tuple(
    getattr(interpreter, name)
    for name in ("TensorHandle", "BlockPointerHandle", "TensorDescHandle")
    if hasattr(interpreter, name)
)
# The types of the operands that are the same in every program.
_CONSTANTS = (
    *(bool, int, float, str, bytes, type(None), type, Enum, np.generic, np.dtype),
    *(tl.dtype, tl.constexpr, InterpreterBuilder, interpreter.ReduceScanOpInterface),
)
# Parts of the names of calls that read or write memory, or that differ from program to program.
_IMPURE = (
    *("program_id", "load", "store", "atomic", "gather", "scatter", "inline", "extern"),
    *("print", "assert", "assume", "barrier"),
)
# The module of the enumerations that are operands of calls.
_IR = interpreter._ir.PADDING_OPTION.__module__
# The smallest number of programs for which a launch is recorded. In a small grid, each program
# often takes a branch of its own, for example if a kernel starts one program for each SM.
_FEWEST_PROGRAMS = 4
# If the programs that were recorded outnumber the replayed programs of a launch by this number, the
# remaining programs are neither recorded nor replayed. Recording makes a program slower by a
# quarter.
_MOST_BRANCHES = 8
# The largest number of bytes of the results of one program. The results are kept until the program
# ends.
_MOST_BYTES = 1 << 28


class _Unknown(Exception):
    """Raised for an operand of an unknown kind."""


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or callable(value) or type(value).__module__ == _IR


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the handles of all tensors in the result of a call, which may be a nested tuple or
    list."""
    if isinstance(value, _HANDLES):
        yield value
    elif isinstance(value, tl.tensor):
        yield value.handle
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)


@dataclass(frozen=True)
class _Call:
    """A recorded call.

    operands: the arguments, with None in the place of each argument that differs between programs.
    places: pairs (place in operands, number of the result of an earlier call).
    nested: pairs (place in operands, function that computes the argument from the list of all
        results), for arguments that contain results.
    named: the keyword arguments.
    """

    function: Callable
    operands: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    nested: tuple[tuple[int, Callable[[list[Any]], Any]], ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """An event: the kernel's Python code read a number outside of a call. number: the index, among
    all results, of the result that contains this number."""

    number: int


@dataclass
class _Branch:
    """The calls of a program up to the next number that Python read outside of a call, or up to the
    end of the program.

    read: the event in which the number was read; None at the end of the program.
    next: for each value of this number, the branch that follows.
    """

    events: list[_Call] = field(default_factory=list)
    read: _Read | None = None
    next: dict[Any, _Branch] = field(default_factory=dict)


class _Recorder:
    """Runs a program, and records its calls in a tree of branches.

    root: the branch in which every program begins.
    made: pairs (event, result) of the calls and reads that the replay of this program has already
        made. The recorder returns these results, and does not make the calls again.
    """

    def __init__(self, root: _Branch, made: Sequence[tuple[Any, Any]]) -> None:
        self.branch, self.made = root, list(reversed(made))
        self.inside, self.usable = False, True
        self.numbers: dict[int, int] = {}
        self.read: set[int] = set()
        self.kept: list[Any] = []  # keeps the results alive, so that their ids stay unique
        self.bytes = 0

    def run(self, function: Callable, arguments: dict[str, Any]) -> None:
        calls = {
            (owner, name): getattr(owner, name)
            for owner, names in _recorded().items()
            for name in names
        }
        for (owner, name), original in calls.items():
            setattr(owner, name, self.recorded(name, original))
        TensorHandle.data = property(self.look, _put_data)
        try:
            function(**arguments)
        finally:
            del TensorHandle.data
            for (owner, name), original in calls.items():
                setattr(owner, name, original)

    def recorded(self, name: str, original: Callable) -> Callable:
        pure = not any(part in name for part in _IMPURE)

        def call(*operands: Any, **named: Any) -> Any:
            if self.inside or not self.usable:
                return original(*operands, **named)
            event = self.event(original, operands, named)
            if pure and event is not None and not event.places and not event.nested:
                event = None  # the result is the same in each program
            if event is not None and self.made:
                result = self.already_made(original)
            else:
                self.inside = True
                try:
                    result = original(*operands, **named)
                finally:
                    self.inside = False
                if event is not None:
                    self.branch.events.append(event)
            if event is not None:
                self.number(result)
            return result

        return call

    def already_made(self, expected: Any) -> Any:
        event, result = self.made.pop()
        if getattr(event, "function", event) != expected:
            raise RuntimeError(
                "an interpreted program made other calls when it was run again than in its replay"
            )
        return result

    def event(self, function: Callable, operands: Any, named: Any) -> _Call | None:
        """Returns the event of a call. Returns None, and makes the recorder unusable, if an operand
        is of an unknown kind."""
        places, nested, given = [], [], list(operands)
        try:
            for place, operand in enumerate(operands):
                number = self.numbers.get(id(operand))
                if number is not None:
                    places.append((place, number))
                elif type(operand) is TensorHandle:
                    continue
                else:
                    rebuild = self.rebuilt(operand)
                    if rebuild is None:
                        continue
                    nested.append((place, rebuild))
                given[place] = None
            if named and any(self.rebuilt(value) is not None for value in named.values()):
                raise _Unknown
        except _Unknown:
            self.usable = False
            return None
        return _Call(function, tuple(given), tuple(places), tuple(nested), dict(named))

    def number(self, result: Any) -> None:
        for leaf in _leaves(result):
            self.numbers[id(leaf)] = len(self.kept)
            self.kept.append(leaf)
            self.bytes += _bytes(leaf)
        self.usable &= self.bytes <= _MOST_BYTES

    def rebuilt(self, operand: Any) -> Callable[[list[Any]], Any] | None:
        """Returns a function that computes the operand from the list of all results; None if the
        operand contains no result."""
        if isinstance(operand, _HANDLES):
            number = self.numbers.get(id(operand))
            return None if number is None else lambda results: results[number]
        if isinstance(operand, tl.tensor):
            inner, type_ = self.rebuilt(operand.handle), operand.type
            return None if inner is None else lambda results: tl.tensor(inner(results), type_)
        if type(operand) in (list, tuple, tl.tuple):
            parts = [(self.rebuilt(part), part) for part in operand]
            if all(make is None for make, _ in parts):
                return None
            kind = type(operand)
            return lambda results: kind(
                [part if make is None else make(results) for make, part in parts]
            )
        if not _is_constant(operand):
            raise _Unknown
        return None

    def look(self, handle: TensorHandle) -> np.ndarray:
        """Returns the data of a handle. Records that Python read a number that may differ between
        programs."""
        data: np.ndarray = handle.__dict__["data"]
        number = None if self.inside else self.numbers.get(id(handle))
        if number is None or number in self.read or not self.usable:
            return data
        self.read.add(number)
        if self.made:
            value = self.already_made(_Read(number))
            self.branch = self.branch.next.setdefault(value, _Branch())
        elif data.size != 1:
            self.usable = False
        else:
            self.branch.read = _Read(number)
            self.branch = self.branch.next.setdefault(data.item(), _Branch())
        return data


def _put_data(handle: TensorHandle, data: np.ndarray) -> None:
    handle.__dict__["data"] = data


def _bytes(handle: Any) -> int:
    return handle.__dict__["data"].nbytes if isinstance(handle, TensorHandle) else 0


def _recorded() -> dict[type, list[str]]:
    """Returns the names of the methods whose calls are recorded, by class."""
    names = [
        name
        for name, value in vars(InterpreterBuilder).items()
        if name.startswith(("create_", "get_")) and not name.endswith("_ty") and callable(value)
    ]
    return {InterpreterBuilder: names, interpreter.ReduceScanOpInterface: ["apply"]}


class _Programs:
    """A function that runs the next program of a launch each time it is called.

    unpaid: how many more programs were recorded than replayed.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.root: _Branch | None = None
        self.usable, self.unpaid = True, 0

    def __call__(self, **arguments: Any) -> None:
        if not self.usable:
            self.function(**arguments)
        elif self.root is None:
            self.root = _Branch()
            self.record(self.root, [], arguments)
        else:
            made = self.replay(self.root)
            if made is None:
                self.unpaid -= 1
            else:
                self.record(self.root, made, arguments)

    def record(self, root: _Branch, made: Sequence[Any], arguments: dict[str, Any]) -> None:
        recorder = _Recorder(root, made)
        recorder.run(self.function, arguments)
        self.unpaid += 1
        self.usable = recorder.usable and self.unpaid < _MOST_BRANCHES

    def replay(self, branch: _Branch) -> list[tuple[Any, Any]] | None:
        """Makes the recorded calls of a program. Returns None if the program is finished. If the
        program reads a number for which no branch is recorded, returns pairs (event, result) for
        all calls and reads of the program up to this one."""
        results: list[Any] = []
        made: list[tuple[Any, Any]] = []
        while True:
            for call in branch.events:
                operands = list(call.operands)
                for place, number in call.places:
                    operands[place] = results[number]
                for place, rebuild in call.nested:
                    operands[place] = rebuild(results)
                result = call.function(*operands, **call.named)
                made.append((call, result))
                if type(result) is TensorHandle:
                    results.append(result)
                else:
                    results += _leaves(result)
            if branch.read is None:
                return None
            value = results[branch.read.number].data.item()
            made.append((branch.read, value))
            if value not in branch.next:
                return made
            branch = branch.next[value]


class Replaying(GridExecutor):
    """Launches an interpreted kernel as Triton does, but replays its programs."""

    def __init__(self, fn: Callable, arg_names: Any, grid: Any, *hooks: Any) -> None:
        super().__init__(fn, arg_names, grid, *hooks)
        if not callable(grid) and prod(grid) >= _FEWEST_PROGRAMS:
            programs = _Programs(fn)

            @functools.wraps(fn)
            def next_program(**arguments: Any) -> None:
                programs(**arguments)

            # Triton reads the signature of the function that it runs.
            next_program.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
            self.fn = next_program
