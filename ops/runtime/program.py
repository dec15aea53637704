"""One call of an op as a sequence of steps, and what is read off it.

A lowering is a generator: it yields each step of a call, gets the step's answer (the new memory,
where it asked for some), and returns an Outcome. `drive` performs the steps on a Machine as they
come, so that memory is allocated and freed in the order in which a call needs it. The same
generator on another machine is planned instead of run: a GPU launches and so runs the call, meta
tensors say which kernels it has (reports, audits), an interpreter checks them without a GPU.
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
    """New memory, of no content until later steps fill it. Answer: the tensor, contiguous."""

    shape: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Buffer:
        """Of a tensor's shape and dtype; what an op's `fake` gives will do."""
        return cls(tensor.shape, tensor.dtype)


@dataclass(frozen=True, slots=True)
class SplitK:
    """Memory for one launch whose programs split K. Answer: (fp32 workspace, int32 counters), the
    counters zero before the launch and after it."""

    num_tiles: int
    elements_per_tile: int


@dataclass(frozen=True, slots=True)
class Launch:
    """An emitted kernel. grid: one to three extents; nothing runs where one of them is zero.
    values: by parameter name; names that the spec holds as constants are not looked at. Answer:
    what makes the same launch with other run-time arguments (tensors, addresses or numbers, in the
    kernel's order); None where nothing ran."""

    spec: KernelSpec
    grid: Sequence[int]
    values: Mapping[str, Any]

    @property
    def given(self) -> tuple[Any, ...]:
        """The run-time arguments in the kernel's order."""
        return tuple([self.values[name] for name, _ in self.spec.signature])


@dataclass(frozen=True, slots=True)
class Library:
    """A library's function of tensors, called as function(*tensors). It works into some of them;
    or, with `makes`, it returns a new tensor like that, which is the answer."""

    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    makes: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory of so many bytes on each rank of a group, zero at first, that all of them reach.

    form: how kernels use it; calls of one form have the same memory, on all ranks. kind: what else
    is the same on all ranks of the kernels that such calls launch. programs: of a launch at most.
    spec: the kernel of this call, which each rank must be able to compile at the first call of its
    kind. flags: shape of the int64 numbers that the memory begins with, [..., ranks]: of the last
    row that each rank has sent here, a higher number for a later one. A rank does not end a kernel
    before all others have sent what it has. Answer: a PeerMemory, the same at every call; None
    where the ranks have none.
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
    """addresses: of int64, where each rank's memory begins here. sent: of int32, zero at first, one
    for each program. Both tensors, or where they lie. rank: one's own. holds: whether it is still
    that of the group of this name."""

    addresses: Any
    sent: Any
    rank: int
    holds: Callable[[], bool] = always


@dataclass(frozen=True, slots=True)
class NotRepeatable:
    """The call is not to be remembered as a sequence of steps; reason: for a reader."""

    reason: str


Step = Buffer | SplitK | Peers | Launch | Library | NotRepeatable


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gives. name, reason: of the lowering and why it, for reports; `reason` is turned
    into text only where one is written."""

    result: Result
    name: str
    reason: object = ""


Steps = Generator[Step, Any, Outcome]
#: A step and its answer.
Done = tuple[Step, Any]


class Machine(Protocol):
    """What steps are performed on."""

    @property
    def target(self) -> Target: ...

    def perform(self, step: Step) -> Any:
        """The step's answer."""

    def maker(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        """Makes such memory at each call."""


@dataclass(frozen=True)
class Program:
    """The steps of one call with their answers, in order. repeatable: the steps are all there, and
    nothing says that the next call may have others."""

    outcome: Outcome
    steps: tuple[Done, ...]
    repeatable: bool = True

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels in the order of their launches."""
        return tuple(step.spec for step, _ in self.steps if isinstance(step, Launch))


def drive(steps: Steps, machine: Machine, *, keep: bool | None = None) -> Program:
    """Performs the steps of a call. What a step raises is raised where it was yielded, so that the
    steps may go another way.

    keep: all steps, or none, are in the program; None: all while the call is repeatable, so that
    the memory of one that is not may be freed. A program without its steps is not repeatable.
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
    """Performs nothing: new memory is on the meta device."""

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
