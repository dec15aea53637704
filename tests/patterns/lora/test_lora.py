"""Tests adapters of many rows in each spelling: each is fused or has a named miss, and the results
are right."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import sympy
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models.lora_bent import BENT, build_bent
from tests.models.lora_idioms import IDIOMS, Layer, build
from tests.programs import lora
from tilewright.compiler import lower, reports
from tilewright.patterns.lora.arguments import has_kernels
from tilewright.patterns.qkv import qkv_cache

#: Models that are not fused, with the reason.
MISSED = {"slice_add": "LORA_IN_PLACE", "taken_along": "LORA_FORM", "one_hot": "LORA_FORM"}
#: Models with one site for each adapter.
SITES = {"looped": 4}
DYNAMIC = (
    "gather_einsum", "stacked_split", "none_where", "sequences_bmm", "grouped",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def run(module, args, dynamic=None):
    """Returns (eager, compiled) outputs, each a tuple, and the report."""
    compiled = torch.compile(
        module, backend="tilewright", dynamic=dynamic, options={"inner": "eager"}
    )
    eager, ours = outputs(module(*args)), outputs(compiled(*args))
    return eager, ours, reports()[-1]


CASES = [(name, None) for name in IDIOMS] + [(name, True) for name in DYNAMIC]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_each_idiom_is_fused_or_missed_by_name(name, dynamic):
    module, args = build(name)
    eager, ours, report = run(module, args, dynamic)
    if name.startswith("grouped"):  # grouped products do not support float64
        exact = outputs(Layer(IDIOMS["gather_einsum"][0]).to(torch.float64)(*map(upcast, args)))
        if name == "grouped_stacked":
            bases = [args[0].double() @ w.double().T for w in module.base.values()]
            exact = tuple(b + 2 * (e - b) for b, e in zip(bases, exact, strict=True))
    else:
        exact = outputs(upcast(module)(*map(upcast, args)))
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert_no_worse(a, b, c, name)
    if name in MISSED:
        assert matches_of(report, "lora", "qkv") == []
        assert codes_of(report, "lora", "qkv") == {MISSED[name]}
    else:
        patterns = ["lora_qkv"] * SITES.get(name, 1)
        assert patterns_in(report, "lora", "qkv") == patterns, misses_of(report, "lora", "qkv")
        assert misses_of(report, "lora", "qkv") == []


@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in MISSED])
def test_one_row_is_fused_like_several(name):
    module, (x, index) = build(name)
    one = x[:1] if x.dim() == 2 else x[:1, :1]
    rows = lower(module, (one, index[:1] if index.dim() == 1 else index[:1, :1])).graphs[-1]
    assert patterns_in(rows, "lora") == ["lora_qkv"] * SITES.get(name, 1)
    assert misses_of(rows, "lora", "qkv") == []


@pytest.mark.parametrize("masked", lora.MASKS)
def test_rows_that_a_mask_takes_out_have_no_adapter(masked):
    """A mask removes rows from the adapters. It may be written as the rows with an adapter, or as
    the rows without one."""
    module, args = lora.build(lora.LoraAxes(masked=masked))
    eager, ours, report = run(module, args)
    assert patterns_in(report, "lora") == ["lora_qkv"]
    exact = outputs(upcast(module)(*map(upcast, args)))
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert_no_worse(a, b, c, masked)


def test_the_adapters_are_read_where_they_are():
    """The adapters are read in place: in front of the op, no table is looked up by index, and
    nothing is joined."""
    lowered = lower(*build("gather_einsum_scaled"))
    names = [str(node.target) for node in lowered.graphs[0].after.graph.nodes]
    assert sum("shrink_qkv_permute_3mn" in name for name in names) == 1
    assert not any("einsum" in name or "cat" in name for name in names)


def test_an_index_beyond_the_adapters_is_an_error_as_before():
    module, (x, index) = build("gather_einsum")
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    compiled(x, index)
    for bad in (4, -5):
        index[2] = bad
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            compiled(x, index)


@pytest.mark.parametrize("name", BENT)
def test_a_bent_model_stays_right(name):
    module, args, expected = build_bent(name)
    eager, ours, report = run(module, args)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(matches_of(report, "lora", "qkv")) == expected.sites, (
        matches_of(report, "lora", "qkv"),
        misses_of(report, "lora", "qkv"),
    )
    assert codes_of(report, "lora", "moe", "qkv") == set(expected.codes)


def test_adapters_that_a_lookup_rescales_are_told():
    """With max_norm, the lookup writes the table that it reads."""
    stacks = [torch.zeros(4, 8 * 64), torch.zeros(4, 64 * 8)]

    def adapted(x, base, ids, a, b):
        a = F.embedding(ids, a, max_norm=1.0).view(-1, 8, 64)
        b = F.embedding(ids, b, max_norm=1.0).view(-1, 64, 8)
        return F.linear(x, base) + (b @ (a @ x[..., None])).squeeze(-1)

    given = (torch.zeros(5, 64), torch.zeros(64, 64), torch.arange(5) % 4, *stacks)
    torch._dynamo.reset()
    lowered = lower(adapted, given)
    (miss,) = misses_of(lowered, "lora_qkv")
    assert (miss.code, "max_norm" in miss.message) == ("LORA_FORM", True)
    assert not lowered.census.unaccounted


def test_the_report_lists_the_kernels_of_both_ops():
    names = [kernel.spec.name for kernel in lower(*build("gather_einsum")).kernels]
    assert any("shrink" in name for name in names), names
    assert any("expand" in name for name in names), names


FLOATS = (torch.float32, torch.float32, torch.float64)


class Cached(torch.nn.Module):
    """Has q, k and v with adapters picked by row. k and v are written by slot."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.ParameterDict({n: torch.randn(64, 96) for n in "qkv"})
        self.a = torch.nn.ParameterDict({n: torch.randn(3, 8, 96) for n in "qkv"})
        self.b = torch.nn.ParameterDict({n: torch.randn(3, 64, 8) for n in "qkv"})

    def forward(self, x, slots, k_cache, v_cache, **ids):
        q, k, v = (
            x @ self.base[n].T
            + torch.bmm(self.b[n][ids[n]], torch.bmm(self.a[n][ids[n]], x.unsqueeze(-1))).squeeze(
                -1
            )
            for n in "qkv"
        )
        k_cache[slots] = k.view(-1, 2, 32)
        v_cache[slots] = v.view(-1, 2, 32)
        return q.relu()


@pytest.mark.parametrize("same", [True, False])
def test_adapters_of_one_batch_go_into_the_cache_write(same):
    torch.manual_seed(0)
    module, one, other = (
        Cached().requires_grad_(False),
        torch.tensor([0, 2, 1]),
        torch.tensor([1, 1, 0]),
    )
    caches = [torch.zeros(16, 2, 32) for _ in range(4)]
    ids = {"q": one, "k": one, "v": one if same else other}
    args = torch.randn(3, 96), torch.tensor([3, 0, 9])
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    ours, eager = compiled(*args, *caches[:2], **ids), module(*args, *caches[2:], **ids)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    report = reports()[-1]
    (site,) = matches_of(report, "lora", "qkv")
    assert (site.pattern, site.shapes["lora"]) == ("qkv_cache", "qkv rank=8 of 3")
    calls = sum("shrink" in str(node.target) for node in lowered_nodes(module, args, caches, ids))
    assert calls == (1 if same else 2)


class CachedSequences(Cached):
    """Has an adapter for each sequence of x [B, 1, K]."""

    def forward(self, x, slots, k_cache, v_cache, ids):
        q, k, v = (
            F.linear(x, self.base[n])
            + torch.bmm(torch.bmm(x, self.a[n][ids].mT), self.b[n][ids].mT)
            for n in "qkv"
        )
        k_cache[slots] = k.view(-1, 2, 32)
        v_cache[slots] = v.view(-1, 2, 32)
        return q.relu()


@pytest.mark.parametrize("sequences", [3, 1])
def test_the_adapter_of_one_sequence_is_no_bias(sequences):
    """The delta of one token has the shape of a bias. It is fused like the deltas of more tokens,
    and not computed before and added."""
    torch.manual_seed(0)
    module = CachedSequences().requires_grad_(False)
    caches = [torch.zeros(16, 2, 32) for _ in range(2)]
    args = torch.randn(sequences, 1, 96), torch.arange(sequences), *caches
    (graph,) = lower(module, (*args, torch.arange(3)[:sequences])).graphs
    (site,) = matches_of(graph, "lora", "qkv")
    assert (site.pattern, site.shapes.get("lora")) == ("qkv_cache", "qkv rank=8 of 3")
    assert site.shapes["bias"] == "no"


def lowered_nodes(module, args, caches, ids):
    return lower(module, (*args, *caches[:2]), ids).graphs[0].after.graph.nodes


@pytest.mark.parametrize("same", [True, False])
def test_adapters_without_kernels_stay_in_the_graph_and_are_added_by_the_cache_write(
    same, monkeypatch
):
    """Adapters without kernels, such as fp32 adapters on a GPU, stay in the graph, and the cache
    write adds them."""
    monkeypatch.setattr(qkv_cache, "has_kernels", lambda delta: False)
    torch.manual_seed(0)
    module, one = Cached().requires_grad_(False), torch.tensor([0, 2, 1])
    ids = {"q": one, "k": one, "v": one if same else one.flip(0)}
    args = torch.randn(3, 96), torch.tensor([3, 0, 9])
    pairs = [[torch.zeros(16, 2, 32, dtype=d) for _ in range(2)] for d in FLOATS]
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    ours, eager = (run(*args, *c, **ids) for run, c in zip((compiled, module), pairs, strict=False))
    exact = copy.deepcopy(module).double()(args[0].double(), args[1], *pairs[2], **ids)
    for results in zip((ours, *pairs[0]), (eager, *pairs[1]), (exact, *pairs[2]), strict=True):
        assert_no_worse(*results, "result")
    report = reports()[-1]
    (site,) = matches_of(report, "lora", "qkv")
    assert site.shapes["lora"] == "qkv rank=8 of 3 added"


class Coded(Cached):
    """Has base projections of int8 codes. Each output feature is scaled after the adapter is added
    to its sum."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.scale = torch.nn.Parameter(torch.rand(64) * 0.02)
        for n in "qkv":
            self.register_buffer(f"codes_{n}", torch.randint(-128, 128, (64, 96)).to(torch.int8))

    def forward(self, x, slots, k_cache, v_cache, ids):
        parts = []
        for n in "qkv":
            y = F.linear(x, getattr(self, f"codes_{n}").to(x.dtype))
            delta = torch.einsum("th,trh->tr", x, self.a[n][ids])
            delta = torch.einsum("tr,twr->tw", delta, self.b[n][ids])
            y = y.add_(delta) if self.in_place else y + delta
            parts.append((y * self.scale).view(-1, 2, 32))
        k_cache[slots], v_cache[slots] = parts[1:]
        return parts[0].relu()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_scale_behind_codes_and_adapters_scales_both(in_place):
    torch.manual_seed(0)
    module = Coded(in_place).requires_grad_(False)
    args = torch.randn(3, 96), torch.tensor([3, 0, 9])
    caches, ids = [torch.zeros(16, 2, 32) for _ in range(4)], torch.tensor([0, 2, 1])
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
    ours, eager = compiled(*args, *caches[:2], ids), module(*args, *caches[2:], ids)
    torch.testing.assert_close([ours, *caches[:2]], [eager, *caches[2:]], rtol=1e-4, atol=1e-4)
    assert "K_PATH" in codes_of(reports()[-1], "lora", "qkv")


def define_operators():
    """Defines operators like those of punica: one writes into y, and one returns the sum."""
    if hasattr(torch.ops.lora_test, "bgmv_expand"):
        return

    @torch.library.custom_op("lora_test::bgmv_shrink", mutates_args=("out",))
    def shrink(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> None:
        out += torch.einsum("th,trh->tr", x, a[ids])

    @torch.library.custom_op("lora_test::bgmv_expand", mutates_args=("y",))
    def expand(y: torch.Tensor, s: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> None:
        y += torch.einsum("tr,twr->tw", s, b[ids])

    @torch.library.custom_op("lora_test::add_lora", mutates_args=())
    def add(y: torch.Tensor, s: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return y + torch.einsum("tr,twr->tw", s, b[ids])

    @torch.library.custom_op("lora_test::expand_dims", mutates_args=())
    def other(y: torch.Tensor) -> torch.Tensor:
        return y * 1

    add.register_fake(lambda y, s, b, ids: torch.empty_like(y))
    other.register_fake(torch.empty_like)


def written(m, x, ids):
    y, s = x @ m.base["q"].T, x.new_zeros(x.shape[0], 8)
    torch.ops.lora_test.bgmv_shrink(s, x, m.a["q"], ids)
    torch.ops.lora_test.bgmv_expand(y, s, m.b["q"], ids)
    return y


def returned(m, x, ids):
    s = torch.einsum("th,trh->tr", x, m.a["q"][ids])
    return torch.ops.lora_test.add_lora(x @ m.base["q"].T, s, m.b["q"], ids)


def unrelated(m, x, ids):
    return torch.ops.lora_test.expand_dims(x @ m.base["q"].T)


@pytest.mark.parametrize(("step", "misses"), [(written, 1), (returned, 1), (unrelated, 0)])
def test_an_operator_that_hides_the_adapters_is_named(step, misses):
    define_operators()
    module = Layer(step, torch.float32)
    args = torch.randn(6, 64), torch.tensor([2, 0, 3, 3, 1, 0])
    eager, ours, report = run(module, args)
    torch.testing.assert_close(ours, eager)
    assert [miss.code for miss in misses_of(report, "lora", "qkv")] == ["LORA_OPERATOR"] * misses
    assert all("lora_test::" in miss.message for miss in misses_of(report, "lora", "qkv"))


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "there"),
    [("cpu", torch.float64, 5, True), ("cuda", torch.bfloat16, 8192, True),
     ("cuda", torch.float64, 1, False), ("cuda", torch.float32, 16, True),
     ("cuda", torch.float32, 64, False), ("cuda", torch.float32, sympy.Symbol("s0"), False)],
)  # fmt: skip
def test_in_fp32_kernels_are_for_a_few_rows(device, dtype, rows, there):
    """In fp32, kernels are used only for a few rows. The cases are the facts that has_kernels
    checks for a delta of rank 16."""
    value = SimpleNamespace(device=torch.device(device), dtype=dtype)
    x = SimpleNamespace(value=value, shape=(rows, 4096))
    delta = SimpleNamespace(x=x, shrink=SimpleNamespace(value=value), rank=16)
    assert has_kernels(delta) is there


@pytest.mark.parametrize("take", lora.TAKES)
def test_adapters_as_wide_as_their_projection_are_told(take):
    module, args = lora.build(lora.LoraAxes(take=take, rank=16, num_heads=1))
    lowered = lower(module, args)
    assert codes_of(lowered, "lora") == {"LORA_FORM"}
    assert not lowered.census.unaccounted
