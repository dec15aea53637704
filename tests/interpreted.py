"""The steps of a call performed without a GPU: kernels on Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import SM90, Target
from tilewright.ops import contract
from tilewright.ops.contract import FusedOp
from tilewright.ops.runtime.program import Buffer, Launch, Library, Program, SplitK, drive


@dataclass
class Interpreter:
    """Performs steps on the CPU; memory that nothing filled holds NaN, or the largest integer.

    kernels: names of the launched kernels in order. known: memory by address, of which a repeated
    launch is given addresses.
    """

    target: Target = field(default_factory=lambda: replace(SM90, num_sms=3))
    kernels: list[str] = field(default_factory=list)
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def perform(self, step):
        match step:
            case Buffer(shape, dtype):
                return self.own(filled(torch.empty(tuple(shape), dtype=dtype)))
            case SplitK(tiles, elements):
                counters = torch.zeros(tiles, dtype=torch.int32)
                return self.own(filled(torch.empty(tiles * elements))), self.own(counters)
            case Library(function, tensors):
                return function(*tensors)
            case Launch(_, grid) if 0 not in grid:
                self.launcher(step)(step.given)
        return None

    def own(self, tensor):
        self.known[tensor.data_ptr()] = tensor
        return tensor

    def launcher(self, launch):
        given = launch.given

        def run(values):
            self.kernels.append(launch.spec.kernel)
            arguments = [self.tensor(v, like) for v, like in zip(values, given, strict=True)]
            grid = (*launch.grid, *(1,) * (3 - len(launch.grid)))
            load_interpreted(launch.spec)[grid](*arguments)

        return run

    def tensor(self, value, like):
        """An argument of a launch; by its address where a repeated launch has that alone."""
        if isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
            return value
        for start, whole in self.known.items():
            if start <= value < start + whole.nbytes:
                part = whole.view(-1).view(torch.uint8)[value - start :][: like.nbytes]
                return part.view(like.dtype).view(like.shape)
        assert value == like.data_ptr()
        return like


def filled(tensor):
    """The tensor with numbers that show where nothing is written."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def interpret(op: FusedOp, arguments, target: Target = SM90, num_sms: int = 3) -> Program:
    """The program of a call, run by the lowering that a GPU would take."""
    machine = Interpreter(replace(target, num_sms=num_sms))
    lowering = op.choose("cuda", arguments).lowering
    assert lowering.build is not None, f"{op.name} is computed by its reference"
    return drive(contract._loaded(lowering.build)(arguments, machine.target), machine)


@pytest.fixture
def interpreter(monkeypatch):
    """Ops run on CPU tensors as on a GPU, on the interpreter: `contract._implementation(op,
    "cuda")` finds it."""
    machine = Interpreter()
    monkeypatch.setattr(contract, "machine_of", lambda device: machine)
    return machine
