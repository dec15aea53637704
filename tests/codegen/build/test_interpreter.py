"""Compares bf16 in the interpreter with torch, bit for bit."""

import ast

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import FunctionRewriter

from tilewright.codegen.build import interpreter_replay, interpreter_speed
from tilewright.codegen.build.interpreter import corrected, interpret, round_to_bf16, widen


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "where":
        z = tl.where(x < y, x, -y)
    elif OP == "scaled":
        z = x * 0.5
    elif OP == "fp32":
        z = (x.to(tl.float32) * y.to(tl.float32) + 1.0).to(tl.bfloat16)
    elif OP == "fp16":
        z = x.to(tl.float16).to(tl.bfloat16)
    else:
        z = tl.full((N,), 3.1415926, tl.bfloat16) + x
    tl.store(out_ptr + offsets, z)


@triton.jit
def reduction(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out_ptr + tl.arange(0, N), tl.max(x, axis=1))
    tl.store(out_ptr + N + tl.arange(0, N), tl.sum(x.to(tl.float32), axis=1).to(tl.bfloat16))
    tl.store(out_ptr + 2 * N + tl.arange(0, N), tl.sum(x, axis=1))


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + rows * N + columns)
    b = tl.load(b_ptr + rows * N + columns)
    tl.store(out_ptr + rows * N + columns, tl.dot(a, b))


EXPECTED = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x < y, x, -y),
    "scaled": lambda x, y: x * 0.5,
    "fp32": lambda x, y: (x.float() * y.float() + 1.0).bfloat16(),
    "fp16": lambda x, y: x.half().bfloat16(),
    "full": lambda x, y: torch.tensor(3.1415926).bfloat16() + x,
}


@pytest.mark.parametrize("op", EXPECTED)
def test_elementwise(op):
    x, y = torch.randn(2, 256).bfloat16()
    out = torch.zeros(256).bfloat16()
    interpret(arithmetic)[(1,)](x, y, out, op, 256)
    torch.testing.assert_close(out, EXPECTED[op](x, y), rtol=0, atol=0)


def test_product_of_bf16_is_exact_in_fp32():
    a, b = torch.randint(-8, 9, (2, 16, 16)).bfloat16() / 4
    out = torch.zeros(16, 16)
    interpret(product)[(1,)](a, b, out, 16)
    assert torch.equal(out.double(), a.double() @ b.double())


def test_reductions():
    x = torch.randn(16, 16).bfloat16()
    out = torch.zeros(48).bfloat16()
    interpret(reduction)[(1,)](x, out, 16)
    assert torch.equal(out[:16], x.max(1).values)
    torch.testing.assert_close(out[16:32].float(), x.float().sum(1), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(out[32:].float(), x.float().sum(1), rtol=2**-8, atol=1e-6)


@triton.jit
def pairs(x_ptr, y_ptr, out_ptr, ASM: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    words = [tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)]
    out = tl.inline_asm_elementwise(ASM, "=r,r,r", words, tl.int32, True, 1)
    tl.store(out_ptr + offsets, out)


def test_inline_products_of_pairs():
    x, y = (torch.randn(64).bfloat16() for _ in range(2))
    out = torch.zeros(64).bfloat16()
    words = [t.view(torch.int32) for t in (x, y, out)]
    interpret(pairs)[(1,)](*words, "mul.rn.bf16x2 $0, $1, $2;", 32)
    assert torch.equal(out, x * y)
    with pytest.raises(Exception, match="does not support the instruction"):
        interpret(pairs)[(1,)](*words, "add.rn.bf16x2 $0, $1, $2;", 32)


def test_rounding_is_torchs_for_all_kinds_of_numbers():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    # The numbers contain ties, infinities, NaNs, subnormals and the largest finite numbers.
    special = np.array([0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1], np.uint32)
    values = np.concatenate([bits, special, special + 1, np.array([0x7FC00000], np.uint32)])
    mine = torch.from_numpy(round_to_bf16(values.view(np.float32)).view(np.int16))
    torchs = torch.from_numpy(values.view(np.float32).copy()).bfloat16()
    nan = torchs.isnan()
    assert torch.equal(mine.view(torch.bfloat16).isnan(), nan)
    assert torch.equal(mine[~nan], torchs.view(torch.int16)[~nan])
    assert np.array_equal(widen(np.array([0x3F80, 0xC000], np.uint16)), [1.0, -2.0])


@triton.jit
def widened(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + N + offsets, x.to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_numbers_of_8_bits_are_torchs(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.zeros(2, 256)
    interpret(widened)[(1,)](codes, out, 256)
    for row in out:
        assert torch.equal(row.isnan(), codes.float().isnan())
        assert torch.equal(row.nan_to_num(7.0), codes.float().nan_to_num(7.0))


def test_corrections_are_gone_afterwards():
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder
    from triton.runtime.jit import JITFunction

    def language():
        kinds = (InterpreterBuilder, TritonSemantic, tl.dtype, tl.block_type, tl.tensor)
        return ([dict(vars(kind)) for kind in kinds], vars(JITFunction).get("__get__"), tl.load)

    before = language()
    with corrected():
        assert InterpreterBuilder.create_dot is not before[0][0]["create_dot"]
        assert tl.load is not before[2]
    assert language() == before


def test_an_error_inside_a_kernel_leaves_the_language_intact():
    before = tl.load
    with pytest.raises(Exception, match="NoneType"):
        interpret(arithmetic)[(1,)](torch.zeros(4), torch.zeros(4), None, "add", 4)
    assert tl.load is before


def test_types_of_one_launch_share_their_parts_and_are_checked_as_ever():
    with corrected():
        one, other = (tl.block_type(tl.int32, shape) for shape in ([4, tl.constexpr(8)], (4, 8)))
        assert one == other
        assert one.shape is other.shape
        assert tl.block_type(tl.int32, [4]) != tl.block_type(tl.uint32, [4])
        for _ in range(2):  # the second call must be refused, too
            with pytest.raises(ValueError, match="power of 2"):
                tl.block_type(tl.int32, [3])
            with pytest.raises(TypeError, match="Shape element 0"):
                tl.block_type(tl.int32, [4.0])
            with pytest.raises(TypeError, match="0d"):
                tl.block_type(tl.int32, [])


@pytest.mark.parametrize("kernel", [arithmetic, reduction, product])
def test_a_function_is_what_triton_makes_of_it_at_the_same_lines(kernel):
    rewriter = FunctionRewriter(kernel.fn)
    rewriter.def_file_lineno = 7
    source = kernel.src
    theirs = rewriter._transform_ast(source)
    ours = interpreter_speed._transformed_in_place(rewriter, source)
    assert "interpreter_semantic" in ast.dump(ours)
    assert ast.dump(ours) == ast.dump(theirs)
    for one, other in zip(ast.walk(ours), ast.walk(theirs), strict=True):
        assert getattr(one, "lineno", None) == getattr(other, "lineno", None)


@triton.jit
def mixed(x_ptr, n_ptr, out_ptr, scale, N: tl.constexpr):
    """A kernel that uses operands of every kind twice, so that the second use reads what the
    interpreter cached at the first."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows * N + columns)
    n = tl.load(n_ptr + rows * N + columns)
    total = x * 0.0
    for _ in range(2):
        total += tl.where(n < 2, x * 2, x / 2) + n * 2 + 2 * n + 2.0 * n + n * 2.0 + scale * x
        total += (rows + columns) * x + columns * rows - (n // 3) + (n % 3) + (3 - n) + (rows < 2)
        total += n.to(tl.int8) * x + 0.0 * n + True * x
    tl.store(out_ptr + rows * N + columns, total)
    tl.store(out_ptr + N * N + rows * N + columns, 1.0 / (x * -0.0) + 1.0 / (x * 0.0))


def test_what_is_kept_of_operands_changes_no_bit(monkeypatch):
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    n = torch.arange(64, dtype=torch.int32).view(8, 8)
    kept, anew = torch.zeros(2, 8, 8), torch.zeros(2, 8, 8)
    interpret(mixed)[(1,)](x, n, kept, 0.25, N=8)
    monkeypatch.setattr(interpreter_speed, "replacements", list)
    interpret(mixed)[(1,)](x, n, anew, 0.25, N=8)
    assert torch.equal(kept.view(torch.int32), anew.view(torch.int32))
    assert len(kept[0].unique()) > 60
    assert kept[0].isfinite().all()


@triton.jit
def summed(x_ptr, counts_ptr, out_ptr, sum_ptr, N: tl.constexpr):
    """Adds the first rows of a program's matrix to its row of `out`. If there are more than two, it
    negates their sum."""
    program, columns = tl.program_id(0), tl.arange(0, N)
    count = tl.load(counts_ptr + program)
    total = tl.zeros((N,), tl.float32)
    for row in range(count):
        total += tl.load(x_ptr + (program * N + row) * N + columns)
    if count > 2:
        total = -total
    tl.store(out_ptr + program * N + columns, tl.load(out_ptr + program * N + columns) + total)
    tl.atomic_add(sum_ptr, tl.sum(total))


@pytest.mark.parametrize(
    ("most", "recorded"),
    [
        # Each of the counts 3, 0 and 1 is a branch.
        pytest.param({}, 3, id="replayed"),
        pytest.param({"_MOST_BRANCHES": 2}, 2, id="branches"),
        pytest.param({"_MOST_BRANCHES": 3}, 3, id="a branch that is replayed"),
        pytest.param({"_MOST_BYTES": 0}, 1, id="bytes"),
        pytest.param({"_FEWEST_PROGRAMS": 7}, 0, id="programs"),
    ],
)
def test_each_program_computes_its_own_numbers(monkeypatch, most, recorded):
    """A program that takes another branch writes to memory once."""
    for name, limit in most.items():
        monkeypatch.setattr(interpreter_replay, name, limit)
    runs, run = [], interpreter_replay._Recorder.run
    monkeypatch.setattr(
        interpreter_replay._Recorder, "run", lambda *args: (runs.append(args), run(*args))
    )
    counts = torch.tensor([3, 0, 3, 1, 0, 3], dtype=torch.int32)
    x = torch.arange(6 * 16 * 16.0).reshape(6, 16, 16)
    sums = [x[i, :n].sum(0) * (-1 if n > 2 else 1) for i, n in enumerate(counts.tolist())]
    out, total = torch.ones(6, 16), torch.zeros(1)
    interpret(summed)[(6,)](x, counts, out, total, 16)
    torch.testing.assert_close(out, torch.stack(sums) + 1, rtol=0, atol=0)
    assert total.item() == torch.stack(sums).sum()
    assert len(runs) == recorded
