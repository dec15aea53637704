"""Performs the steps of a call without a GPU, with kernels on Triton's interpreter."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.scaled_products import blocks_on_a_cpu
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import SM90, Target
from tilewright.ops import calls, fused_op
from tilewright.ops.contract import FusedOp
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    PeerMemory,
    Peers,
    Program,
    SplitK,
    Steps,
    drive,
)


@lru_cache(maxsize=128)
def interpreted(spec):
    """Returns the kernel of a spec for Triton's interpreter, which rewrites a kernel at its first
    run."""
    return load_interpreted(spec)


@dataclass
class Interpreter:
    """Performs steps on the CPU. Memory that no step has filled holds NaN, or the largest integer.

    kernels: the names of the launched kernels, in order.
    runs: whether kernels are run; if it is False, they are only recorded.
    peers: the memory that ranks share; None if they share none.
    """

    target: Target = field(default_factory=lambda: replace(SM90, num_sms=3))
    kernels: list[str] = field(default_factory=list)
    runs: bool = True
    peers: PeerMemory | None = None

    def perform(self, step):
        match step:
            case Buffer(shape, dtype):
                return filled(torch.empty(tuple(shape), dtype=dtype))
            case SplitK(tiles, elements):
                return filled(torch.empty(tiles * elements)), torch.zeros(tiles, dtype=torch.int32)
            case Peers():
                return self.peers
            case Library(function, tensors):
                with blocks_on_a_cpu():
                    return function(*tensors)
            case Launch(_, grid) if 0 not in grid:
                launch = self.launcher(step)
                launch(step.given)
                return launch
        return None

    def maker(self, buffer):
        return partial(self.perform, buffer)

    def launcher(self, launch):
        spec, grid = launch.spec, (*launch.grid, *(1,) * (3 - len(launch.grid)))
        views = [view_of(value) for value in launch.given]

        def run(values):
            self.kernels.append(spec.kernel)
            if self.runs:
                given = [argument(*pair) for pair in zip(values, views, strict=True)]
                interpreted(spec)[grid](*given)

        return run


def wait_idly():
    """Makes kernels of this process sleep before each atomic operation. A kernel that waits for
    another rank reads a flag again and again, and would take the processor from that rank."""
    atomic = InterpreterBuilder.create_atomic_rmw

    def later(self, *args):
        time.sleep(5e-4)
        return atomic(self, *args)

    InterpreterBuilder.create_atomic_rmw = later


def view_of(value):
    """Returns the dtype, shape and strides of a tensor. A kernel sees nothing else of it. Returns
    None for a number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return None


def argument(value, view):
    """Returns the argument for the interpreter. A repeated launch has addresses instead of
    tensors."""
    if view is None or isinstance(value, torch.Tensor):
        return value
    dtype, shape, strides = view
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(value)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def filled(tensor):
    """Fills a tensor with numbers that show which elements were not written."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


def steps_of(op: FusedOp, arguments, target: Target) -> Steps:
    """Returns the steps of the lowering that a GPU would use."""
    lowering = op.choose("cuda", arguments).lowering
    assert lowering.build is not None, f"{op.name} is computed by its reference"
    return fused_op.loaded(lowering.build)(arguments, target)


def interpret(op: FusedOp, arguments, target: Target = SM90, num_sms: int = 3) -> Program:
    """Performs a call on the interpreter, and returns its program."""
    machine = Interpreter(replace(target, num_sms=num_sms))
    return drive(steps_of(op, arguments, machine.target), machine)


@pytest.fixture
def interpreter(monkeypatch):
    """Makes ops run on CPU tensors as they would on a GPU, with kernels on the interpreter. Calls
    that `calls.Calls(op, "cuda")` makes use it."""
    machine = Interpreter()
    monkeypatch.setattr(calls, "machine_of", lambda device: machine)
    return machine
