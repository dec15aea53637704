"""Tests operators that `declare` describes, from outside the package.

A call is fused if a pattern matches what the operator computes. Otherwise the original call is put
back. A declaration that does not fit the operator is refused.
"""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch import nn

from tests.agreement import assert_no_worse, cloned
from tests.extension_example import opaque_ops as ops
from tests.found import assert_accounted, counting, misses_of, patterns_in
from tests.models import moe_idioms
from tilewright.compiler import declare, lower, reports, undeclare
from tilewright.compiler.rewrite import declared, normal

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "undeclared")


@pytest.fixture
def undeclared():
    """Empties the registry before and after a test."""
    assert not declared._DECLARED
    yield
    declared._DECLARED.clear()


def graphs_of(lowered):
    (graph,) = lowered.graphs
    return str(graph.before.graph), str(graph.after.graph)


def run(model, args, **options):
    """Returns the results and arguments after the call, compiled and eager."""
    ours, eager = cloned(args), cloned(args)
    options = {"inner": "eager", **options}
    actual = torch.compile(model, backend="tilewright", options=options)(*ours)
    return (actual, ours), (model(*eager), eager)


def assert_as_eager(model, args, **options):
    actual, expected = run(model, args, **options)
    leaves = [torch.utils._pytree.tree_leaves(held) for held in (actual, expected)]
    for a, b in zip(*leaves, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


# --- fused ----------------------------------------------------------------------------------------


@pytest.fixture
def mixture(monkeypatch):
    """Returns a mixture of experts that combines its results by a custom operator, like
    torchtitan's."""

    def combine(y, order, rows, shape):
        out = torch.zeros(shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        return ops.scatter_add(out, rows[:, None].expand(-1, y.shape[1]), y)

    monkeypatch.setitem(moe_idioms.COMBINES, "opaque", combine)
    return moe_idioms.build("plain", combine="opaque")


def test_a_mixture_with_a_scatter_of_its_own(mixture):
    (miss,) = misses_of(lower(*mixture), "moe")
    assert miss.code == "EXPERT_COMBINE"
    assert "say what tests_opaque::scatter_add computes: tilewright.declare" in miss.hint
    declare("tests_opaque::scatter_add", ops.scatter_add_meaning)
    torch._dynamo.reset()
    model, args = mixture
    (actual, _), (eager, _) = run(model, args)
    assert "moe" in patterns_in(reports()[-1], "moe")
    assert_no_worse(actual, eager, moe_idioms.exact(model, *args), "mixture")


class Attention(nn.Module):
    """An attention whose projections and cache write are a user's operators."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, width in (("q", 128), ("k", 64), ("v", 64)):
            codes = torch.randint(-127, 128, (width, 64), generator=generator, dtype=torch.int8)
            self.register_buffer(name, codes)
            scale = torch.rand(width, 1, generator=generator) / 256
            self.register_buffer(f"{name}_scale", scale.bfloat16())

    def linear(self, x, name):
        return ops.int8_linear(x, getattr(self, name), getattr(self, f"{name}_scale"))

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (self.linear(x, name).view(len(x), -1, 32) for name in "qkv")
        ops.store(k, v, k_cache, v_cache, slots)
        return q * 2


def attention_args():
    generator = torch.Generator().manual_seed(1)
    x, k_cache, v_cache = (
        torch.randn(s, generator=generator).bfloat16()
        for s in ((3, 64), (4, 4, 2, 32), (4, 4, 2, 32))
    )
    return x, torch.tensor([3, 9, 1]), k_cache, v_cache


class TiledAttention(Attention):
    """An attention whose codes are stored in tiles, so that their shape is not that of a matrix."""

    def __init__(self):
        super().__init__()
        for name in "qkv":
            codes = getattr(self, name)
            tiles = codes.view(len(codes) // 16, 16, 4, 16).transpose(1, 2).contiguous()
            setattr(self, name, tiles)

    def linear(self, x, name):
        return ops.tiled_linear(x, getattr(self, name), getattr(self, f"{name}_scale"))


def test_projections_and_a_cache_write_that_no_one_knows_are_told():
    points = []
    backend = counting(points)
    torch.compile(TiledAttention(), backend=backend, options={"inner": "eager"})(*attention_args())
    (miss,) = misses_of(reports()[-1], "qkv")
    assert miss.code == "OPAQUE_WRITE"
    assert_accounted(points)


def test_quantised_projections_and_a_cache_write():
    model, args = Attention(), attention_args()
    declare(torch.ops.tests_opaque.int8_linear, ops.int8_linear_meaning)
    (miss,) = misses_of(lower(model, args), "qkv")
    assert miss.code == "OPAQUE_WRITE"
    assert "say what tests_opaque::store computes: tilewright.declare" in miss.hint
    declare(ops.store, ops.store_meaning)
    torch._dynamo.reset()
    dynamic = lower(model, args, dynamic=True)
    assert patterns_in(dynamic, "qkv") == ["qkv_cache"]
    names = {node.name for node in dynamic.graphs[0].before.graph.nodes}
    assert names.issuperset(dynamic.matches[0].absorbed)
    torch._dynamo.reset()
    (actual, ours), (eager, theirs) = run(model, args)
    report = reports()[-1]
    assert [(m.pattern, m.shapes["weight"]) for m in report.matches] == [("qkv_cache", "int8")]
    assert report.misses == ()
    x, slots, *caches = args
    exact = [
        x.double() @ (getattr(model, n).double() * getattr(model, f"{n}_scale").double()).T
        for n in "qkv"
    ]
    assert_no_worse(actual, eager, exact[0].view(3, -1, 32) * 2, "q")
    for i, (cache, new) in enumerate(zip(caches, exact[1:], strict=True)):
        wanted = cache.double()
        wanted.view(-1, 2, 32)[slots] = new.view(3, -1, 32)
        assert_no_worse(ours[2 + i], theirs[2 + i], wanted, f"cache {i}")


# --- put back -------------------------------------------------------------------------------------


def test_calls_that_no_pattern_took_are_put_back():
    for op, meaning in ((ops.store, ops.store_meaning), (ops.int8_linear, ops.int8_linear_meaning)):
        declare(op, meaning)
    lowered = lower(Attention(), attention_args(), patterns=["moe"])
    before, after = graphs_of(lowered)
    assert before == after
    assert lowered.misses == []
    torch._dynamo.reset()
    assert_as_eager(Attention(), attention_args(), patterns=["moe"])


class Halves(nn.Module):
    """Returns results that share no memory. The graph changes some of them in place, and one
    argument is written."""

    def forward(self, out, x):
        one, two, copy, other = ops.halves(out, x)
        one.view(-1)[:3].add_(1)
        copy.mul_(2)
        return one * 1, two, copy, other, out + 1


def test_results_in_place_and_their_strides():
    args = torch.zeros(4, 8), torch.randn(4, 8)
    _, undeclared = graphs_of(lower(Halves(), args))
    torch._dynamo.reset()
    declare(ops.halves, ops.halves_meaning)
    _, after = graphs_of(lower(Halves(), args))
    assert undeclared == after
    torch._dynamo.reset()
    assert_as_eager(Halves(), args)


def test_what_a_meaning_returns_lies_as_what_the_operator_returns(monkeypatch):
    """The replacement of an operator must return the memory layout of the operator. The graph is
    only the replacement, which a fused op may leave in the graph."""
    declare(ops.halves, ops.halves_meaning)
    args = torch.zeros(4, 8), torch.randn(4, 8)
    seen = []
    original = normal.spell_out

    def spell(graph, kinds, kept=()):
        found, misses = original(graph, kinds, kept)
        seen.append([node.target for site in found for node in site.added])
        for site in found:
            for node in (*site.results, site.call):
                graph.erase_node(node)
        return [], misses

    monkeypatch.setattr("tilewright.compiler.rewrite.normal.spell_out", spell)
    graph = lower(Halves(), args).graphs[0].after
    assert torch.ops.aten.clone.default in seen[0]
    graph.recompile()
    ours, eager = cloned(args), cloned(args)
    for a, b in zip((*graph(*ours), *ours), (*Halves()(*eager), *eager), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@torch.library.custom_op(f"{ops.LIBRARY}::combined", mutates_args=())
def combined(
    out: torch.Tensor, index: torch.Tensor, src: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return combined_meaning(out, index, src, weight)


def combined_meaning(out, index, src, weight):
    return out.scatter_add(0, index, src).to(weight.dtype) @ weight


combined.register_fake(lambda out, index, src, weight: out.to(weight.dtype))


def test_an_operator_stays_whole_where_products_would_be_left(monkeypatch):
    weight = torch.eye(64, dtype=torch.bfloat16)

    def combine(y, order, rows, shape):
        out = torch.zeros(shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        return combined(out, rows[:, None].expand(-1, y.shape[1]), y, weight)

    monkeypatch.setitem(moe_idioms.COMBINES, "opaque", combine)
    declare(combined, combined_meaning)
    lowered = lower(*moe_idioms.build("plain", combine="opaque"))
    (miss,) = misses_of(lowered, "declare")
    assert (miss.code, miss.weight) == ("PART_OF_CALL", "advice")
    assert "moe" not in patterns_in(lowered, "moe")
    assert torch.ops.tests_opaque.combined.default in {
        node.target for node in lowered.graphs[0].after.graph.nodes
    }


def test_what_is_read_of_a_spelled_out_form_alone_leaves_the_call():
    """If only a part of the replacement is needed, the call stays. The norm gives the rows that the
    projections read, and is no part of the fused operations."""

    class Normed(Attention):
        def forward(self, x, slots, k_cache, v_cache):
            x, rest = x.clone(), x * 2
            add_norm(x, rest)
            return super().forward(x, slots, k_cache, v_cache), rest

    for op, meaning in (
        (ops.store, ops.store_meaning),
        (ops.int8_linear, ops.int8_linear_meaning),
        (add_norm, add_norm_meaning),
    ):
        declare(op, meaning)
    lowered = lower(Normed(), attention_args())
    assert [m.pattern for m in lowered.matches] == ["qkv_cache"]
    assert lowered.misses == []
    after = [node.target for node in lowered.graphs[0].after.graph.nodes]
    assert after.count(torch.ops.tests_opaque.add_norm.default) == 1
    assert torch.ops.aten.rms_norm.default not in after


@torch.library.custom_op(f"{ops.LIBRARY}::add_norm", mutates_args=("x", "rest"))
def add_norm(x: torch.Tensor, rest: torch.Tensor) -> None:
    add_norm_meaning(x, rest)


def add_norm_meaning(x, rest):
    rest.add_(x)
    x.copy_(torch.nn.functional.rms_norm(rest, (x.shape[-1],)))


@pytest.mark.parametrize("index", [None, slice(0, 2)], ids=["the tuple", "a part of it"])
def test_a_call_whose_results_are_read_together_is_not_spelled_out(index):
    """A call whose results are read as one tuple is not replaced: a value could stand for each
    result, but not for the tuple."""
    graph = torch.fx.Graph()
    call = graph.call_function(torch.var_mean, (graph.placeholder("x"),))
    call.meta["example_value"] = torch.ones(3), torch.ones(3)
    graph.call_function(operator.getitem, (call, 0))
    if index is None:
        graph.call_function(torch.stack, (call,))
    else:
        graph.call_function(operator.getitem, (call, index))
    with pytest.raises(declared.UnfitError, match="used as a whole"):
        declared._results(call)


# --- wrong meanings -------------------------------------------------------------------------------


def test_a_wrong_meaning_is_found_by_verify():
    declare(ops.int8_linear, ops.int8_linear_meaning)
    declare(
        ops.store,
        lambda k, v, k_cache, v_cache, slots, workspace: ops.store_meaning(
            v, k, k_cache, v_cache, slots, workspace
        ),
    )
    assert patterns_in(lower(Attention(), attention_args()), "qkv") == ["qkv_cache"]
    torch._dynamo.reset()
    assert_as_eager(Attention(), attention_args(), verify=True)
    said = reports()[-1]
    assert said.matches == ()
    assert "the fused graph differs: input " in str(said.notes)


class Scatter(nn.Module):
    def forward(self, out, index, src):
        return ops.scatter_add(out, index, src)


def scatter_args():
    return torch.zeros(3, 4), torch.tensor([1, 0])[:, None].expand(-1, 4), torch.randn(2, 4)


def doubled(out, index, src):
    return out.scatter_add(0, index, src), out


def cut(out, index, src):
    return out.scatter_add(0, index, src)[1:]


def widened(out, index, src):
    return out.scatter_add(0, index, src).double()


def writing(out, index, src):
    return out.scatter_add_(0, index, src).clone()


def raising(out, index, src):
    raise TypeError("not this one")


_OWN = torch.ones(1)


def reading(out, index, src):
    return out + _OWN


def asking(out, index, src):
    return out if bool((src > 0).any()) else src


UNFIT = {
    doubled: "returns float32[3, 4] on cpu, float32[3, 4] on cpu; the operator returns",
    cut: "returns float32[2, 4] on cpu; the operator returns float32[3, 4] on cpu",
    widened: "returns float64[3, 4]",
    writing: "operator's schema says nothing",
    raising: "raises TypeError: not this one",
    reading: "",
    asking: "",
}


@pytest.mark.parametrize("meaning", UNFIT, ids=lambda f: f.__name__)
def test_a_meaning_that_does_not_fit_is_a_miss(meaning):
    declare(ops.scatter_add, meaning)
    lowered = lower(Scatter(), scatter_args())
    (miss,) = misses_of(lowered, "declare")
    assert (miss.code, miss.weight) == ("DECLARED_FORM", "lost")
    assert f"tests_opaque::scatter_add is declared as tests.test_declared.{meaning.__name__}, " in (
        miss.message
    )
    assert UNFIT[meaning] in miss.message
    assert "name the meaning's parameters as the operator's arguments" in miss.hint
    undeclare(ops.scatter_add)
    torch._dynamo.reset()
    assert graphs_of(lowered)[1] == graphs_of(lower(Scatter(), scatter_args()))[1]


def test_a_meaning_that_does_not_write_what_the_schema_says():
    declare(ops.store, lambda k, v, k_cache, v_cache, slots, workspace: None)
    (miss,) = misses_of(lower(Attention(), attention_args()), "declare")
    assert "writes nothing; the operator's schema says l_k_cache_, l_v_cache_" in miss.message


def test_a_meaning_may_make_a_table():
    """A declaration may make a table, whose numbers are then known. A tensor that the declaration
    holds may change."""
    numbers = [n / 8 for n in range(-8, 8)]
    held = torch.tensor(numbers)

    @torch.library.custom_op(f"{ops.LIBRARY}::by_table", mutates_args=())
    def by_table(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return meaning(lambda: torch.tensor(numbers), x, codes, scale)

    by_table.register_fake(lambda x, codes, scale: x.new_empty(len(x), len(codes)))

    def meaning(table, x, codes, scale):
        weight = table()[codes.int()].to(x.dtype) * scale
        return nn.functional.linear(x, weight)

    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    args = torch.randn(3, 128).bfloat16(), codes, torch.rand(64, 1).bfloat16()

    def misses(table):
        declare(by_table, lambda x, codes, scale: meaning(table, x, codes, scale))
        torch._dynamo.reset()
        found = lower(lambda *args: by_table(*args) * 2, args)
        undeclare(by_table)
        return misses_of(found, "declare")

    assert misses(lambda: torch.tensor(numbers)) == []
    (miss,) = misses(lambda: held)
    assert miss.code == "DECLARED_FORM"


def test_under_autocast_the_operator_stays():
    declare(ops.scatter_add, ops.scatter_add_meaning)
    with torch.autocast("cpu", torch.bfloat16):
        (miss,) = misses_of(lower(Scatter(), scatter_args()), "declare")
    assert "autocast" in miss.message


# --- the registry ---------------------------------------------------------------------------------


def test_declaring_twice():
    name = "tests_opaque::scatter_add"
    for op in (name, ops.scatter_add, torch.ops.tests_opaque.scatter_add.default):
        declare(op, ops.scatter_add_meaning)
    with pytest.raises(ValueError, match=r"is declared as .*scatter_add_meaning, got .*cut"):
        declare(name, cut)
    undeclare(ops.scatter_add)
    with pytest.raises(KeyError):
        undeclare(name)
    declare(name, cut)


@pytest.mark.parametrize(
    ("op", "meaning", "said"),
    [
        ("scatter_add", cut, 'its name "namespace::name", got'),
        (cut, cut, 'its name "namespace::name", got'),
        ("aten::add", cut, "which tilewright knows"),
        ("tests_opaque::scatter_add", "x + y", "expected a function"),
        ("tests_opaque::scatter_add", lambda out, index: out, r"function of \(out, index, src\)"),
        ("tests_opaque::store", cut, "the arguments of tests_opaque.store.default"),
    ],
)
def test_what_cannot_be_declared(op, meaning, said):
    with pytest.raises(ValueError, match=said):
        declare(op, meaning)
    assert not declared._DECLARED


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests_opaque::store", ""),
        ("tests_opaque::store.default", ""),
        ("tests_opa*::store", ""),
        ("tests_opaque::stor", "'tests_opaque::stor' is registered, so .* mean 'tests_opaque::sto"),
        ("tests_opaque::store.out", "'tests_opaque::store.out' is registered"),
        ("no_such_library*::store", "'no_such_library*::store' is registered"),
    ],
)
def test_a_declaration_of_no_registered_operator_is_told(name, said, caplog):
    declare(name, ops.store_meaning)
    lowered = lower(nn.Linear(4, 4), (torch.zeros(1, 4),))
    torch._dynamo.reset()
    torch.compile(nn.Linear(4, 4), backend="tilewright")(torch.zeros(1, 4))
    for text in ("\n".join(lowered.notes), "\n".join(reports()[-1].notes), caplog.text):
        assert ("is registered" in text) == bool(said)
        assert re.search(said.replace("*:", r"\*:"), text)


def test_builds_of_a_hubs_kernel():
    library = torch.library.Library("_tests_kernel_0f3a9bc_dirty", "DEF")
    library.define("gelu(Tensor x) -> Tensor")
    (overload,) = declared._registered("_tests_kernel_0f3a9bc_dirty::gelu")
    for name, found in {
        "tests_kernel::gelu": True,
        "_tests_kernel_*::gelu": True,
        "_tests_kernel_0f3a9bc_dirty::gelu": True,
        "tests_kernel::gelu_new": False,
        "tests::gelu": False,
        "_tests_other_*::gelu": False,
    }.items():
        declare(name, torch.nn.functional.gelu if found else cut)
    assert declared._meaning_of(overload) is torch.nn.functional.gelu
    for name in [name for name in declared._DECLARED if "gelu_new" not in name]:
        undeclare(name)
    assert declared._meaning_of(overload) is None
