"""One call of an op as a sequence of steps.

A lowering is a generator. It yields each step of a call, receives the step's answer (such as a new
tensor), and returns an Outcome. `drive` lets a Machine perform each step as it is yielded, so
memory is allocated and freed in the order in which a call needs it. The same generator has
different uses on different machines: a GPU runs the call, a Planner on meta tensors finds the
call's kernels (for reports and audits), and an interpreter checks the kernels without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target

Result = torch.Tensor | tuple[torch.Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A step that allocates memory without initialising it. The answer is the contiguous tensor."""

    shape: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer of a tensor's shape and dtype; a fake tensor suffices."""
        return cls(tensor.shape, tensor.dtype)


@dataclass(frozen=True, slots=True)
class SplitK:
    """A step that allocates memory for one launch whose programs split K. The answer is (fp32
    workspace, int32 counters). The counters are zero before and after the launch."""

    num_tiles: int
    elements_per_tile: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that launches an emitted kernel. The answer is a function that repeats the launch with
    other run-time arguments (tensors, addresses or numbers, in the kernel's order); None if nothing
    ran.

    Attributes:
        spec: The spec of the kernel.
        grid: One to three extents. If one of them is zero, nothing runs.
        values: The values of parameters, by name. Names that are constants in the spec are ignored.
    """

    spec: KernelSpec
    grid: Sequence[int]
    values: Mapping[str, Any]

    @property
    def given(self) -> tuple[Any, ...]:
        """The run-time arguments in the kernel's order."""
        return tuple([self.values[name] for name, _ in self.spec.signature])


@dataclass(frozen=True, slots=True)
class Library:
    """A step that calls a library's function, as function(*tensors). The function writes to some of
    the tensors. If `makes` is given, the function instead returns a new tensor with the shape and
    dtype of `makes`, and this tensor is the answer."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    makes: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """A step that provides memory of `nbytes` bytes on each rank of a group. The memory is zero at
    first, and every rank can access the memory of all ranks. The answer is a PeerMemory, which is
    the same at every call; None if the ranks have no such memory.

    Attributes:
        group: The name of the group.
        form: How kernels use the memory. All calls of one form share the memory, on all ranks.
        kind: Further properties of the kernel, in which kernels of one form may differ. They are
            the same on all ranks.
        nbytes: The size of the memory of each rank.
        programs: The largest number of programs of a launch.
        spec: The kernel of this call. Each rank must be able to compile it at the first call of its
            kind.
        flags: The shape [..., ranks] of the int64 flags at the start of the memory. A flag has the
            number of the last row that one rank has sent to this memory. The numbers only grow. A
            rank finishes a kernel only after all other ranks have sent their data.
    """

    group: str
    form: str
    kind: str
    nbytes: int
    programs: int
    spec: KernelSpec
    flags: tuple[int, ...]


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory that ranks share.

    Attributes:
        addresses: An int64 tensor, or the address of one: the start of each rank's memory, as this
            rank addresses it.
        sent: An int32 tensor, or the address of one, with a number for each program: how many rows
            the program has sent. The numbers are zero at first.
        rank: The number of this rank in the group.
        holds: A function that returns whether the name still belongs to the group that allocated
            the memory.
    """

    addresses: Any
    sent: Any
    rank: int
    holds: Callable[[], bool] = always


@dataclass(frozen=True, slots=True)
class NotRepeatable:
    """A step that prevents the call from being repeated as a recorded sequence of steps. reason: a
    text for people."""

    reason: str


Step = Buffer | SplitK | Peers | Launch | Library | NotRepeatable


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call.

    Attributes:
        result: The result.
        name: The name of the lowering.
        reason: Why the lowering was chosen, for reports. It is converted to text only when a report
            is written.
    """

    result: Result
    name: str
    reason: object = ""


Steps = Generator[Step, Any, Outcome]
#: A step and its answer.
Done = tuple[Step, Any]


class Machine(Protocol):
    """Performs steps."""

    @property
    def target(self) -> Target: ...

    def perform(self, step: Step) -> Any:
        """Performs a step and returns its answer."""

    def maker(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        """Returns a function that allocates such a buffer at each call."""


@dataclass(frozen=True)
class Program:
    """The steps of one call with their answers, in order.

    Attributes:
        outcome: The outcome of the call.
        steps: Pairs (step, answer).
        repeatable: Whether the steps are complete, and no step says that the next call may differ.
    """

    outcome: Outcome
    steps: tuple[Done, ...]
    repeatable: bool = True

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels, in the order of their launches."""
        return tuple(step.spec for step, _ in self.steps if isinstance(step, Launch))


def drive(steps: Steps, machine: Machine, *, keep: bool | None = None) -> Program:
    """Performs the steps of a call. If a step raises an exception, the exception is raised inside
    the generator, at the place where the generator yields the step. The generator can then compute
    the call in another way.

    keep: whether the program keeps the steps. If it is None, the program keeps the steps while the
    call is repeatable. If the call is not repeatable, the memory of its steps can be freed.
    """
    done: list[Done] = []
    repeatable, answer = keep is not False, None
    failure: Exception | None = None
    while True:
        try:
            step = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration as stop:
            return Program(stop.value, tuple(done), repeatable)
        if isinstance(step, NotRepeatable):
            repeatable, answer, failure = False, None, None
            if not keep:
                done.clear()
            continue
        try:
            answer, failure = machine.perform(step), None
        except Exception as error:
            failure = error
            continue
        if repeatable or keep:
            done.append((step, answer))


@dataclass(frozen=True)
class Planner:
    """A machine that performs nothing. New tensors are on the meta device."""

    target: Target

    def perform(self, step: Step) -> Any:
        match step:
            case Buffer() as made:
                return _on_meta(made)
            case SplitK(tiles, elements):
                workspace = torch.empty(tiles * elements, device="meta")
                return workspace, torch.empty(tiles, dtype=torch.int32, device="meta")
            case Peers():
                return PeerMemory(None, None, 0)
            case Library(makes=Buffer() as made):
                return _on_meta(made)
        return None

    def maker(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        return partial(_on_meta, buffer)


def _on_meta(made: Buffer) -> torch.Tensor:
    return torch.empty(tuple(made.shape), dtype=made.dtype, device="meta")
