"""Tests ops through AOTAutograd and Inductor: no cache is copied, and no dynamic size is
specialised."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.generated_code import generated_code
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.samples import AttentionCase

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")
# The cache is larger than everything else in the step, so that a copy of it is easy to see.
BIG = {
    "num_pages": 64,
    "page_size": 16,
    "rope_style": "half",
    "rotary_dim": 32,
    "dtype": torch.float32,
}
TWO_BASES = AttentionCase("two_bases", **BIG)
ONE_BASE = AttentionCase("one_base", layout="vllm_pair", **BIG)
INSIDE_BLOCK = AttentionCase("inside_block", layout="max_pair", **BIG)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(op, count):
    """Returns a function of the op's arguments that runs `count` layers on the same caches, as in a
    model. Each layer reads the caches after its write, and the input of the next layer depends on
    that read."""

    def run(args, kwargs):
        sources = 1 if op is QKV else 2
        k_cache, v_cache = args[len(args) - 5], args[len(args) - 4]
        total = 0
        for _ in range(count):
            inputs = [None if arg is None else arg + total for arg in args[:sources]]
            q = op_call(op)(*inputs, *args[sources:], **kwargs)
            seen = [cache[0].mean() for cache in (k_cache, v_cache) if cache is not None]
            total = total + sum(seen) + (0 if q is None else q.mean())
        return total

    return run


def op_call(op):
    return getattr(torch.ops.tilewright, op.name)


def allocated_elements(code):
    """Returns the size of every buffer that the generated code allocates."""
    shapes = re.findall(r"empty_strided\w*\(\s*\(([^()]*)\)", code)
    sizes = []
    for shape in shapes:
        size = 1
        for factor in filter(None, shape.replace(" ", "").split(",")):
            size *= int(factor)
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("op", "case", "v2"),
    [
        pytest.param(op, case, (row + column) % 2 == 0, id=f"{op.name}-{case.name}")
        for row, op in enumerate((QKV, STORE))
        for column, case in enumerate((TWO_BASES, ONE_BASE, INSIDE_BLOCK))
    ],
)
def test_inductor_allocates_nothing_of_the_caches_size(op, case, v2):
    """The cases are all pairs of an op, a kind of cache and a version of auto_functionalized."""
    config = torch._inductor.config.patch(enable_auto_functionalized_v2=v2)
    with config, torch.no_grad():
        compiled = torch.compile(layers(op, 2), fullgraph=True)
        code = generated_code(compiled, *op.split(op.sample_inputs(case)))
    sizes = allocated_elements(code)
    assert code.count(f"torch.ops.tilewright.{op.name}.default(") == 2
    assert sizes  # the pattern still matches the code of this torch
    window_elements = case.num_pages * case.page_size * case.num_kv_heads * case.head_dim
    assert max(sizes) < window_elements // 8
    assert "clone" not in code
    assert "copy_(" not in code


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
def test_inductor_gives_what_eager_gives(v2):
    arguments, eager = (QKV.sample_inputs(ONE_BASE) for _ in range(2))
    expected = layers(QKV, 2)(*QKV.split(eager))
    config = torch._inductor.config.patch(enable_auto_functionalized_v2=v2)
    with config, torch.no_grad():
        actual = torch.compile(layers(QKV, 2), fullgraph=True)(*QKV.split(arguments))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(arguments.k_cache, eager.k_cache)
    torch.testing.assert_close(arguments.v_cache, eager.v_cache)


def test_the_measure_sees_a_copy():
    """The control: under v1, one tensor as two mutated arguments is copied as a whole, and the test
    sees it."""
    arguments = STORE.sample_inputs(TWO_BASES)
    library = torch.library.Library("functionalisation_control", "FRAGMENT")
    library.define("write(Tensor k, Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()")
    library.impl("write", lambda k, k_cache, v_cache: None, "CPU")
    torch.library.register_fake(
        "functionalisation_control::write", lambda k, k_cache, v_cache: None, lib=library
    )

    def run(k, cache):
        torch.ops.functionalisation_control.write(k + 1, cache, cache)
        return cache[0].sum()

    with torch._inductor.config.patch(enable_auto_functionalized_v2=False), torch.no_grad():
        compiled = torch.compile(run, fullgraph=True)
        code = generated_code(compiled, arguments.k, arguments.k_cache)
    assert max(allocated_elements(code)) >= arguments.k_cache.numel()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", [QKV, STORE], ids=lambda op: op.name)
def test_the_number_of_tokens_stays_dynamic(op, backend):
    """One graph serves every T. If a check specialised T, the graph would recompile or raise an
    error."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layers(op, 1), fullgraph=True, backend=counter)
    for tokens in (5, 7, 12):
        a, eager = (op.sample_inputs(replace(TWO_BASES, num_tokens=tokens)) for _ in range(2))
        values = (a.x,) if op is QKV else (a.k, a.v)
        for tensor in (*values, a.slot_mapping, a.cos, a.sin):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            total = compiled(*op.split(a))
        assert torch.equal(total, layers(op, 1)(*op.split(eager)))
        assert torch.equal(a.k_cache, eager.k_cache)
    assert counter.frame_count == 1


def test_the_number_of_pages_stays_dynamic():
    counter = CompileCounterWithBackend("aot_eager")

    def run(k, k_cache, slot_mapping):
        pages, size, heads, dim = k_cache.shape
        strides = [size * heads * dim, heads * dim, dim, 1]
        window = [pages, size, heads, dim, *strides, 0]
        torch.ops.tilewright.paged_kv_store(k, None, k_cache, None, slot_mapping, window, [])

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for pages in (4, 6, 9):
        case = AttentionCase("pages", num_pages=pages, writes_v=False)
        a, eager = (STORE.sample_inputs(case) for _ in range(2))
        torch._dynamo.mark_dynamic(a.k_cache, 0)
        compiled(a.k, a.k_cache, a.slot_mapping)
        STORE.call(eager)
        assert torch.equal(a.k_cache, eager.k_cache)
    assert counter.frame_count == 1


def test_a_mismatch_symbols_cannot_see_is_caught_when_it_runs():
    """The sizes of x and slot_mapping are different symbols. Their lengths are compared only at run
    time."""
    a = STORE.sample_inputs(replace(TWO_BASES, rope_style="none", rotary_dim=0))
    args, kwargs = STORE.split(a)
    compiled = torch.compile(op_call(STORE), fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(*args, **kwargs)
    before = a.k_cache.clone()
    args[4] = a.slot_mapping[:4]
    with pytest.raises(ValueError, match=r"slot_mapping: expected shape \[T\] = \[5\]"):
        compiled(*args, **kwargs)
    assert torch.equal(a.k_cache, before)
