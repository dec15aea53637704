"""One call of an op as a sequence of steps.

A lowering is a generator: it yields each step of a call, receives the step's answer (such as new
memory), and returns an Outcome. `drive` performs the steps on a Machine as they come, so that
memory is allocated and freed in the order in which a call needs it. A generator gives different
results on different machines: a GPU runs the call, a Planner on meta tensors finds its kernels (for
reports and audits), and an interpreter checks the kernels without a GPU.
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
    """New memory, uninitialised. Answer: the tensor, contiguous."""

    shape: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer of a tensor's shape and dtype; a fake tensor suffices."""
        return cls(tensor.shape, tensor.dtype)


@dataclass(frozen=True, slots=True)
class SplitK:
    """Memory for one launch whose programs split K. Answer: (fp32 workspace, int32 counters); the
    counters are zero before and after the launch."""

    num_tiles: int
    elements_per_tile: int


@dataclass(frozen=True, slots=True)
class Launch:
    """An emitted kernel. grid: one to three extents; nothing runs if one of them is zero. values:
    by parameter name; names that are constants in the spec are ignored. Answer: a function that
    repeats the launch with other run-time arguments (tensors, addresses or numbers, in the kernel's
    order); None if nothing ran."""

    spec: KernelSpec
    grid: Sequence[int]
    values: Mapping[str, Any]

    @property
    def given(self) -> tuple[Any, ...]:
        """The run-time arguments in the kernel's order."""
        return tuple([self.values[name] for name, _ in self.spec.signature])


@dataclass(frozen=True, slots=True)
class Library:
    """A library's function, called as function(*tensors). It writes into some of the tensors; or,
    with `makes`, it returns a new tensor like that buffer, which is the answer."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    makes: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Zeroed memory of `nbytes` bytes on each rank of a group, which all ranks can access.

    form: how kernels use the memory; calls of one form share it, on all ranks. kind: further
    properties of the launched kernels that are the same on all ranks. programs: the most programs
    of a launch. spec: the kernel of this call; each rank must be able to compile it at the first
    call of its kind. flags: shape [..., ranks] of the int64 numbers at the start of the memory.
    Each flag is the number of the last row that one rank has sent here; row numbers only grow. A
    rank finishes a kernel only after all others have sent their data. Answer: a PeerMemory, the
    same at every call; None if the ranks have none.
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
    """Memory shared by ranks. addresses: int64, the start of each rank's memory as seen from this
    rank. sent: int32, zero at first, one for each program. Both are tensors, or their addresses.
    rank: this rank. holds: whether the name still belongs to the group that made the memory."""

    addresses: Any
    sent: Any
    rank: int
    holds: Callable[[], bool] = always


@dataclass(frozen=True, slots=True)
class NotRepeatable:
    """Prevents the call from being repeated as a recorded sequence of steps. reason: for a
    reader."""

    reason: str


Step = Buffer | SplitK | Peers | Launch | Library | NotRepeatable


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call. name: the lowering's name. reason: why the lowering was chosen, for
    reports; it is converted to text only when a report is written."""

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
        """Returns a function that allocates such memory at each call."""


@dataclass(frozen=True)
class Program:
    """The steps of one call with their answers, in order. repeatable: the steps are complete, and
    no step says that the next call may differ."""

    outcome: Outcome
    steps: tuple[Done, ...]
    repeatable: bool = True

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels in the order of their launches."""
        return tuple(step.spec for step, _ in self.steps if isinstance(step, Launch))


def drive(steps: Steps, machine: Machine, *, keep: bool | None = None) -> Program:
    """Performs the steps of a call. If a step raises an exception, it is raised inside the
    generator at its yield, so that the generator can take another way.

    keep: whether the program holds the steps. None: it holds them while the call is repeatable; if
    the call is not, the memory of its steps can be freed.
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
    """A machine that performs nothing: new memory is on the meta device."""

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
