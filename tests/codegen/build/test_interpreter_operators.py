"""Operators of one numpy call give what Triton's own functions give, bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tilewright.codegen.build import interpreter_operators, interpreter_speed
from tilewright.codegen.build.interpreter import interpret

N = 8


@triton.jit
def all_operators(x_ptr, y_ptr, out_ptr, scalar, INTEGER: tl.constexpr, N: tl.constexpr):
    """Each operator twice: the first result tells Triton's, the second is the numpy call's."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows * N + columns)
    line = tl.load(y_ptr + tl.arange(0, N))
    y = line[None, :]
    place = out_ptr + (rows * N + columns).to(tl.int64)
    for turn in range(2):
        out = place + turn * 40 * N * N
        tl.store(out, (x + y).to(tl.float32))
        tl.store(out + N * N, (x - y).to(tl.float32))
        tl.store(out + 2 * N * N, (x * line[:, None]).to(tl.float32))
        tl.store(out + 3 * N * N, (x / y).to(tl.float32))
        tl.store(out + 4 * N * N, ((x < y) | (x > y)).to(tl.float32))
        tl.store(out + 5 * N * N, ((x <= y) & (x >= y)).to(tl.float32))
        tl.store(out + 6 * N * N, ((x == y) ^ (x != y)).to(tl.float32))
        tl.store(out + 7 * N * N, (x * scalar + y).to(tl.float32))
        tl.store(out + 8 * N * N, (x + 3).to(tl.float32))
        tl.store(out + 9 * N * N, (3 - x).to(tl.float32))
        tl.store(out + 10 * N * N, (x * 0.1).to(tl.float32))
        tl.store(out + 11 * N * N, (1.0 / x).to(tl.float32))
        tl.store(out + 12 * N * N, (x < 0.3).to(tl.float32))
        tl.store(out + 13 * N * N, (1.0 / (x * -0.0)).to(tl.float32))
        tl.store(out + 14 * N * N, (x > 1e-42).to(tl.float32))
        tl.store(out + 15 * N * N, x.to(tl.bfloat16).to(tl.float32))
        tl.store(out + 16 * N * N, x.to(tl.float16).to(tl.float32))
        tl.store(out + 17 * N * N, x.to(tl.int8).to(tl.float32))
        tl.store(out + 18 * N * N, x.to(tl.float32)[:, :, None].to(tl.float32).reshape(N, N))
        tl.store(out + 19 * N * N, (True * x).to(tl.float32))
        if INTEGER:
            tl.store(out + 20 * N * N, ((x & y) | (x ^ 5)).to(tl.float32))
            tl.store(out + 21 * N * N, (x + 2147483647).to(tl.float32))
            tl.store(out + 22 * N * N, (x * x.to(tl.int64) + 5000000000).to(tl.float32))
            wide, narrow = x.to(tl.int64) * 3000000000, y.to(tl.int16)
            tl.store(out + 23 * N * N, (wide * narrow - y).to(tl.float32))
            tl.store(out + 24 * N * N, ((narrow - wide < x) & (wide == narrow)).to(tl.float32))
            tl.store(out + 25 * N * N, (narrow / wide).to(tl.float32))


KINDS = {
    torch.float32: False,
    torch.float64: False,
    torch.float16: False,
    torch.bfloat16: False,
    torch.int8: False,  # a number of more bits than it has is refused
    torch.int32: True,
    torch.int64: True,
}


def outcome(dtype):
    numbers = torch.linspace(-3, 4, N * N).view(N, N)
    if not dtype.is_floating_point:
        numbers = torch.arange(1, N * N + 1).view(N, N)
    line = numbers[3].clone()
    out = torch.zeros(2, 40, N, N)
    interpret(all_operators)[(1,)](numbers.to(dtype), line.to(dtype), out, 3, KINDS[dtype], N)
    return out.view(torch.int32)


def without_operators(monkeypatch):
    monkeypatch.setattr(interpreter_speed, "quick", lambda name, original: original)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_bits_are_tritons(monkeypatch, dtype):
    ours = outcome(dtype)
    without_operators(monkeypatch)
    theirs = outcome(dtype)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[0], ours[1])
    assert ours[0].flatten(1).any(1).sum() >= 16


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_function_that_differs_from_tritons_is_not_used(monkeypatch):
    monkeypatch.setitem(interpreter_operators._FUNCTIONS, "add", np.subtract)
    ours = outcome(torch.float32)
    monkeypatch.undo()
    assert torch.equal(ours, outcome(torch.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_operators_are_numpys_the_second_time(monkeypatch, dtype):
    """Without this, the tests above would hold for operators that always ask Triton."""
    quickly = []
    result_of = interpreter_operators._Result.of

    def counted(self, *arrays):
        quickly.append(self)
        return result_of(self, *arrays)

    monkeypatch.setattr(interpreter_operators._Result, "of", counted)
    outcome(dtype)
    assert len({id(result) for result in quickly}) >= 12


@triton.jit
def added(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, N), x + tl.load(x_ptr + tl.arange(0, 2 * N)))


def test_shapes_that_triton_refuses_are_refused():
    with pytest.raises(Exception, match="incompatible dimensions"):
        interpret(added)[(1,)](torch.zeros(16), torch.zeros(16), 8)
