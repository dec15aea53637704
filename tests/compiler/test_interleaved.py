"""Tests K and V of all layers that are stored in the rows of one tensor: which views share no
memory, and what follows from this.

Continuous batching keeps the caches of all layers in `[rows, heads, head_dim]`, which it reads as
`[blocks, layers, 2, page, heads, head_dim]`. Layers of another type divide the same tensor into
other blocks.
"""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import sympy
import torch
from torch import nn

from tests.compiler.running import compiled, copies
from tests.compiler.steps import HKV, D, Layer, make_args
from tests.compiler.test_no_copy import allocations, loops
from tests.found import codes_of, patterns_in
from tests.generated_code import generated_code
from tests.patterns.running import check_against_eager
from tilewright.compiler import reports
from tilewright.compiler.safety.legality import _effects_disjoint
from tilewright.ops.cache.checks import check_pair
from tilewright.ops.checks import ArgumentError
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.patterns import effects

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BLOCKS, LAYERS, PAGE = 3, 2, 4
ROWS = BLOCKS * LAYERS * 2 * PAGE


# --- selections ---------------------------------------------------------------------------------


def random_view(rng, rows):
    """Returns an effect and the same view of `rows` [n, 2], made by random reshapes, slices and
    selections."""
    effect, view = effects.identity(rows.shape), rows
    for _ in range(rng.randint(1, 5)):
        dim = rng.randrange(len(view.shape) - 1) if view.dim() > 1 else 0
        size = view.shape[dim]
        kind = rng.choice(("split", "select", "narrow", "permute"))
        if kind == "split" and size % 2 == 0:
            shape = [*view.shape[:dim], size // 2, 2, *view.shape[dim + 1 :]]
            try:
                effect, view = effects.reshape(effect, shape), view.view(shape)
            except (effects.InexpressibleError, RuntimeError):
                continue
        elif kind == "select" and view.dim() > 2:
            at = rng.randrange(size)
            effect, view = effects.select(effect, dim, at), view.select(dim, at)
        elif kind == "narrow" and size > 1:
            step = rng.choice((1, 1, 2, 3))
            start = rng.randrange(size)
            length = rng.randint(1, 1 + (size - 1 - start) // step)
            effect = effects.narrow(effect, dim, start, length, step)
            view = view.narrow(dim, start, 1 + (length - 1) * step)
            view = view[(slice(None),) * dim + (slice(None, None, step),)]
        elif kind == "permute" and view.dim() > 1:
            order = rng.sample(range(view.dim()), view.dim())
            effect, view = effects.permute(effect, order), view.permute(order)
    return effect, view


def test_selections_are_apart_exactly_where_they_share_no_element():
    """Compares the proofs that two views share no element with the elements that random views of
    one tensor select."""
    rng = random.Random(0)
    rows = torch.arange(2 * 48).view(48, 2)
    answers = {True: 0, False: 0}
    for _ in range(1500):
        (one, a), (other, b) = random_view(rng, rows), random_view(rng, rows)
        apart = set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())
        assert _effects_disjoint(one, other) == apart
        assert _effects_disjoint(other, one) == apart
        answers[apart] += 1
    assert min(answers.values()) > 200  # both answers occurred


def pages_of(rows, layers, page):
    """Returns an effect for K and for V of each layer, from rows [rows, Hkv, D]."""
    blocks = rows // (layers * 2 * page)
    pages = effects.reshape(effects.identity((rows, HKV, D)), (blocks, layers, 2, page, HKV, D))
    return [
        effects.select(effects.select(pages, 1, layer), 1, part)
        for layer in range(layers)
        for part in range(2)
    ]


@pytest.mark.parametrize("rows", [ROWS, sympy.Symbol("s0", positive=True, integer=True) * 16])
def test_k_and_v_of_all_layers_are_apart_whatever_the_number_of_rows(rows):
    parts = pages_of(rows, LAYERS, PAGE)
    assert all(_effects_disjoint(a, b) for a, b in combinations(parts, 2))
    assert not any(_effects_disjoint(a, a) for a in parts)


def shifted(effect, by):
    return effect._replace(start=(effect.start[0] + by, *effect.start[1:]))


@pytest.mark.parametrize("rows", [ROWS, sympy.Symbol("s0", positive=True, integer=True) * 16])
@pytest.mark.parametrize("by", [-1, 1])
def test_windows_that_overlap_by_one_row_are_not_apart(rows, by):
    first, *others = pages_of(rows, LAYERS, PAGE)
    neighbour = others[0] if by < 0 else others[-1]
    assert _effects_disjoint(first, neighbour)
    assert not _effects_disjoint(first, shifted(neighbour, by))


def test_views_of_two_allocators_are_apart_only_where_no_block_can_hold_both():
    """One allocator has two layers in a block, and the other one layer. So a block of the second
    may be two blocks of the first."""
    full, sliding = pages_of(ROWS, 2, PAGE), pages_of(ROWS, 1, PAGE)
    held = torch.arange(ROWS * HKV * D).view(ROWS, HKV, D)
    tensors = [
        held.view(-1, layers, 2, PAGE, HKV, D)[:, layer, part]
        for layers in (2, 1)
        for layer in range(layers)
        for part in range(2)
    ]
    every = list(zip((*full, *sliding), tensors, strict=True))
    answers = set()
    for (one, a), (other, b) in combinations(every, 2):
        apart = set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())
        assert _effects_disjoint(one, other) == apart
        answers.add(apart)
    assert answers == {True, False}


def test_slices_at_a_symbol_follow_each_other():
    n = sympy.Symbol("s1", positive=True, integer=True)
    rows = effects.identity((2 * n, HKV, D))
    first, second = (effects.narrow(rows, 0, at, n) for at in (0, n))
    assert _effects_disjoint(first, second)
    assert not _effects_disjoint(first, effects.narrow(rows, 0, n - 1, n))


def test_windows_of_an_op_interleave_but_do_not_share_a_row():
    rows = torch.empty(ROWS, HKV, D)
    pages = rows.view(BLOCKS, LAYERS, 2, PAGE, HKV, D)
    windows = [CacheWindow.of(pages[:, i, j], rows) for i in range(LAYERS) for j in range(2)]
    for one, other in combinations(windows, 2):
        check_pair("op", {"k_window": one, "v_window": other}, one_base=True)
    one, other = windows[:2]
    near = CacheWindow(**{**vars(other), "offset": other.offset - HKV * D})
    with pytest.raises(ArgumentError, match="shares no element"):
        check_pair("op", {"k_window": one, "v_window": near}, one_base=True)


# --- graphs -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Attention layers of one graph, with their caches in one tensor.

    `write` gets this tensor [rows, Hkv, D], the page and the offset of each token, and k and v of
    every layer.
    """

    def __init__(self, write, layers=LAYERS):
        super().__init__()
        self.write = write
        self.parts = nn.ModuleList(Layer(None) for _ in range(layers))

    def forward(self, x, rows, slots):
        q, k, v = zip(*(part.qkv(x * (i + 1)) for i, part in enumerate(self.parts)), strict=True)
        found = self.write(rows, slots // PAGE, slots % PAGE, k, v)
        return torch.stack(q).sum(0) if found is None else torch.stack(q).sum(0) + found


def given(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(ROWS, HKV, D, generator=generator)
    return make_args()[0].to(dtype), rows.to(dtype), torch.tensor([3, 9, 0, 7, 10])


def part(rows, layer, kv, layers=LAYERS):
    """Returns K (0) or V (1) of a layer, [blocks, page, Hkv, D]."""
    return rows.view(-1, layers, 2, PAGE, HKV, D)[:, layer, kv]


def by_layer(rows, page, offset, k, v):
    for i in range(LAYERS):
        part(rows, i, 0)[page, offset] = k[i]
        part(rows, i, 1)[page, offset] = v[i]


def other_layer_cleared_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    part(rows, 1, 0)[0].zero_()
    part(rows, 0, 1)[page, offset] = v[0]


def index_put(rows, page, offset, k, v):
    for i in range(LAYERS):
        part(rows, i, 0).index_put_((page, offset), k[i])
        part(rows, i, 1).index_put_((page, offset), v[i])


def two_allocators(rows, page, offset, k, v):
    """Writes by two allocators, each with its own size of blocks. The last write may overwrite what
    the first wrote."""
    for i, layers in enumerate((LAYERS, 1)):
        part(rows, 0, 0, layers)[page, offset] = k[i]
        part(rows, 0, 1, layers)[page, offset] = v[i]


def other_layer_read_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    held = part(rows, 1, 0)[page, offset].sum((1, 2))[:, None, None]
    part(rows, 0, 1)[page, offset] = v[0]
    return held


def old_values_read_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    held = part(rows, 0, 1)[page, offset].sum((1, 2))[:, None, None]
    part(rows, 0, 1)[page, offset] = v[0]
    return held


def beside(rows, page, offset, k, v):
    """Stores V one page of rows after K."""
    further_on(PAGE, rows, page, offset, k, v)


def further_on(by, rows, page, offset, k, v):
    whole = 2 * LAYERS * PAGE
    part(rows[:-whole], 0, 0)[page % (BLOCKS - 1), offset] = k[0]
    part(rows[by : by - whole], 0, 0)[page % (BLOCKS - 1), offset] = v[0]


FUSED = {
    by_layer: 2, index_put: 2, two_allocators: 2, other_layer_read_between: 1,
    other_layer_cleared_between: 1, old_values_read_between: 1, beside: 1,
}  # fmt: skip


@pytest.mark.parametrize("write", FUSED, ids=lambda write: write.__name__)
def test_keys_and_values_in_rows_of_one_tensor_are_fused(write):
    check_against_eager(write.__name__, Layers(write), given(), ["qkv_cache"] * FUSED[write])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_are_in_16_bits(dtype):
    layers = Layers(by_layer).to(dtype)
    check_against_eager("16 bits", layers, given(dtype), ["qkv_cache"] * LAYERS)


@pytest.mark.parametrize("spelling", ["view", "unflatten"])
def test_a_symbolic_number_of_rows_is_fused_and_compiled_once(spelling):
    """The view shows that the rows are whole blocks. The symbolic number of rows does not."""

    def write(rows, page, offset, k, v):
        for i in range(LAYERS):
            for kv, written in enumerate((k, v)):
                if spelling == "view":
                    pages = rows.view(-1, LAYERS, 2, PAGE, HKV, D)
                else:
                    pages = rows.unflatten(0, (-1, LAYERS, 2, PAGE))
                pages[:, i, kv][page, offset] = written[i]

    layers = Layers(write)
    fused = compiled(layers)
    for more in (0, 2):
        x, rows, slots = given()
        rows = torch.cat((rows, rows[: more * 2 * LAYERS * PAGE]))
        torch._dynamo.mark_dynamic(rows, 0)
        before, slots = rows.clone(), slots + more * PAGE  # now the step writes to the added rows
        expected, actual = layers(x, before, slots), fused(x, rows, slots)
        torch.testing.assert_close((actual, rows), (expected, before), rtol=1e-4, atol=1e-5)
    assert [patterns_in(report, "qkv") for report in reports()] == [["qkv_cache"] * LAYERS]


# --- near misses --------------------------------------------------------------------------------


def one_row_over(rows, page, offset, k, v):
    """Stores V one row less than a page after K."""
    further_on(PAGE - 1, rows, page, offset, k, v)


def keys_read_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    held = part(rows, 0, 0)[page, offset].sum((1, 2))[:, None, None]
    part(rows, 0, 1)[page, offset] = v[0]
    return held


def all_read_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    held = rows.sum()
    part(rows, 0, 1)[page, offset] = v[0]
    return held


def other_allocator_cleared_between(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    part(rows, 0, 0, 1)[0].zero_()
    part(rows, 0, 1)[page, offset] = v[0]


MISSED = {
    one_row_over: "CACHE_OVERLAP", keys_read_between: "CACHE_READ", all_read_between: "CACHE_READ",
    other_allocator_cleared_between: "CACHE_WRITE",
}  # fmt: skip


@pytest.mark.parametrize("write", MISSED, ids=lambda write: write.__name__)
def test_what_may_meet_is_not_moved(write):
    layers, ours, eager = Layers(write), copies(given()), copies(given())
    expected, actual = layers(*eager), compiled(layers)(*ours)
    torch.testing.assert_close((actual, ours[1]), (expected, eager[1]), rtol=1e-4, atol=1e-5)
    assert MISSED[write] in codes_of(reports()[-1], "qkv")
    assert "qkv_cache" not in patterns_in(reports()[-1], "qkv")


def test_rows_that_share_memory_are_not_apart():
    """If rows overlap in memory, different rows may have the same elements."""
    x, rows, slots = given()
    layers = Layers(by_layer)

    def overlapping():
        return rows.clone().as_strided(rows.shape, (D, D, 1))

    ours, eager = overlapping(), overlapping()
    expected, actual = layers(x, eager, slots), compiled(layers)(x, ours, slots)
    torch.testing.assert_close((actual, ours), (expected, eager), rtol=1e-4, atol=1e-5)
    assert patterns_in(reports()[-1], "qkv") == []


# --- what the inner compiler makes of a missed site ---------------------------------------------


def squashed_keys(rows, page, offset, k, v):
    """Computes keys that are not the result of a projection, so that only the writes are fused, as
    a pair."""
    by_layer(rows, page, offset, [x.tanh() for x in k], v)


def keys_alone(rows, page, offset, k, v):
    """Writes the keys of two layers to the same slots of one tensor, as one pair of writes."""
    for i in range(LAYERS):
        part(rows, i, 0)[page, offset] = k[i]


def index_copies_of_shifted_rows(rows, page, offset, k, v):
    """Writes as transformers does: each token has one number, and the rows start a page apart."""
    row = page * (LAYERS * 2 * PAGE) + offset
    for i in range(LAYERS):
        rows[2 * i * PAGE :].index_copy_(0, row, k[i])
        rows[(2 * i + 1) * PAGE :].index_copy_(0, row, v[i])


def keys_read_for_values(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    part(rows, 0, 1)[page, offset] = v[0] + part(rows, 0, 0)[page, offset]


def other_slots_for_values(rows, page, offset, k, v):
    part(rows, 0, 0)[page, offset] = k[0]
    part(rows, 0, 1)[page.flip(0), offset.flip(0)] = v[0]


PATTERNS = ["qkv_cache", "cache_store"]  # no pattern matches linears of float32

#: For each write that is missed by `qkv_cache`: how many ops perform it.
STORED = {
    squashed_keys: 2, keys_alone: 1, index_copies_of_shifted_rows: 4, other_slots_for_values: 2,
    one_row_over: 2, keys_read_for_values: 2,
}  # fmt: skip


@pytest.mark.parametrize("write", STORED, ids=lambda write: write.__name__)
def test_a_missed_write_copies_no_part_of_the_cache(write):
    """The smallest written view, the keys of one layer, has 256 KiB. All other tensors have at most
    32 KiB.

    Inductor compiles the rewritten graph, in which `paged_kv_store` takes the tensor of all layers.
    """
    x, rows, slots = given()
    many = rows.repeat(256 * 1024 // (BLOCKS * PAGE * HKV * D * 4), 1, 1)
    run = torch.compile(Layers(write), backend="tilewright", options={"patterns": PATTERNS})
    code = generated_code(run, x, many, slots)
    assert patterns_in(reports()[-1], "qkv") == ["cache_store"] * STORED[write]
    assert code.count("torch.ops.tilewright.paged_kv_store.default(") == STORED[write]
    assert max(allocations(code)) < 32 * 1024
    assert max(loops(code), default=0) < 32 * 1024


@pytest.mark.parametrize("write", [by_layer, squashed_keys], ids=lambda write: write.__name__)
def test_stock_inductor_copies_parts_of_the_cache(write):
    """The control: the bounds of the test above do detect a copy."""
    x, rows, slots = given()
    many = rows.repeat(256 * 1024 // (BLOCKS * PAGE * HKV * D * 4), 1, 1)
    code = generated_code(torch.compile(Layers(write), backend="inductor"), x, many, slots)
    assert max(*allocations(code), 4 * max(loops(code), default=0)) >= 128 * 1024
