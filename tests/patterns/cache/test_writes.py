"""Tests which place a write goes to, and which two writes are a pair: tables, slices, and one
storage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.steps import HKV, D, K, Layer, T, make_args, plain, store
from tests.found import matches_of, misses_of, patterns_in
from tests.models.qkv_idioms import build
from tests.patterns.cache.reported import codes, patterns, run
from tests.patterns.running import check_against_eager
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- slots --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "page_size"), [("max_blocks", 16), ("max_blocks", 128), ("slots_computed", 256)]
)
def test_pages_of_every_size(name, page_size):
    module, args = build(name, page_size=page_size)
    check_against_eager(name, module, args, ["qkv_cache"])
    assert matches_of(reports()[-1], "qkv")[0].shapes["slots"] == "block_table"


class ByTable(torch.nn.Module):
    """Writes K and V at `locate(m, table, seq, positions)`, which returns (page, offset)."""

    def __init__(self, locate):
        super().__init__()
        self.layer, self.locate = Layer(plain), locate

    def forward(self, x, k_cache, v_cache, table, seq, positions):
        q, k, v = self.layer.qkv(x)
        page, offset = self.locate(table, seq, positions)
        k_cache[page, offset] = k
        v_cache[page, offset] = v
        return q * 2


def table_args():
    x, k_cache, v_cache, _ = make_args()
    table = torch.tensor([[3, 1], [0, 5], [2, 4]])
    return x, k_cache, v_cache, table, torch.tensor([0, 0, 1, 1, 2]), torch.tensor([7, 8, 0, 15, 3])


def bumped(table, seq, positions):
    """Advances the positions in place within the graph, so an op at the end of the graph could not
    read the old positions."""
    place = table[seq, positions // 8], positions % 8
    positions.add_(1)
    return place


OTHER_TABLES = {
    "other page size": lambda t, s, p: (t[s, p // 16], p % 8),
    "other positions": lambda t, s, p: (t[s, p // 8], (p + 1) % 8),
    "shifted table": lambda t, s, p: (t[s, p // 8] - 0 * p, p % 8),
    "towards zero": lambda t, s, p: (t[s, torch.div(p, 8, rounding_mode="trunc")], p % 8),
    "positions that move": bumped,
}


@pytest.mark.parametrize("name", OTHER_TABLES)
def test_what_is_no_block_table_gets_slots_computed(name):
    args = table_args()
    check_against_eager(name, ByTable(OTHER_TABLES[name]), args, ["qkv_cache"])
    assert matches_of(reports()[-1], "qkv")[0].shapes["slots"] == "page+offset"


def test_pages_and_sequences_count_from_the_end_as_in_pytorch():
    x, k_cache, v_cache, table, seq, positions = table_args()
    args = (x, k_cache, v_cache, table - 6, seq - 3, positions)
    module = ByTable(lambda t, s, p: (t[s, p // 8], p % 8))
    check_against_eager("negative", module, args, ["qkv_cache"])
    assert matches_of(reports()[-1], "qkv")[0].shapes["slots"] == "block_table"


def test_positions_count_from_the_end_as_in_pytorch():
    x, k_cache, v_cache, table, seq, positions = table_args()
    args = (x, k_cache, v_cache, table, seq, positions - 16)
    module = ByTable(lambda t, s, p: (t[s, p // 8], p % 8))
    check_against_eager("negative positions", module, args, ["qkv_cache"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_slot_from_data_is_a_node_that_the_op_takes(whole):
    """`start = lengths[0].item()` is computed from data in front of the op. It belongs to no
    input."""

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.qkv = nn.Parameter(torch.randn(32, 16, generator=generator))

        def forward(self, x, k_cache, v_cache, lengths):
            q, k, v = F.linear(x, self.qkv).view(1, -1, 8, 4).split([4, 2, 2], 2)
            start = lengths[2].item()
            torch._check(start >= 0)
            torch._check(start + 4 <= 9)
            k_cache[:, start : start + 4] = k
            v_cache[:, start : start + 4] = v
            end = 9 if whole else start + 4
            q, k, v = (t.transpose(1, 2) for t in (q, k_cache[:, :end], v_cache[:, :end]))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 16, generator=generator)
    for start in (0, 3, 5):
        caches = torch.randn(2, 1, 9, 2, 4, generator=generator).unbind()
        args = [x, *caches, torch.tensor([7, 8, start])]
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            check_against_eager("slots", Step(), args, ["qkv_cache"])
        assert patterns_in(reports()[-1], "attention") == ["cache_attention"]


# --- slices -------------------------------------------------------------------------------------


class Sliced(torch.nn.Module):
    """Calls `write(cache, heads [B, S, H, D], start)` for K and V."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = Layer(plain), write

    def forward(self, x, k_cache, v_cache, start):
        q, k, v = (p(x).unflatten(-1, (-1, D)) for p in self.projections())
        self.write(k_cache, k, start)
        self.write(v_cache, v, start)
        return q * 2

    def projections(self):
        return self.layer.q_proj, self.layer.k_proj, self.layer.v_proj


def by_slice(cache, heads, start):
    cache[: heads.shape[0], start : start + heads.shape[1]] = heads


def by_narrow(cache, heads, start):
    cache.narrow(0, 0, heads.shape[0]).narrow(1, start, heads.shape[1]).copy_(heads)


def first_sequence_only(cache, heads, start):
    cache[0, start : start + heads.shape[1]] = heads[0]


def sliced_args(batch, length, start=3):
    x = torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(0))
    return x, *(torch.randn(4, 16, HKV, D) for _ in range(2)), start


@pytest.mark.parametrize(
    ("write", "batch", "length"),
    [(by_slice, 2, 5), (by_slice, 1, 1), (by_narrow, 3, 1), (by_narrow, 1, 5)],
)
def test_a_slice_is_a_run_of_slots(write, batch, length):
    args = sliced_args(batch, length)
    check_against_eager("slice", Sliced(write), args, ["qkv_cache"])
    assert matches_of(reports()[-1], "qkv")[0].shapes["slots"] == "slice"


def test_a_slice_of_one_sequence_is_a_run_of_slots():
    check_against_eager("slice", Sliced(first_sequence_only), sliced_args(1, 5), ["qkv_cache"])


def test_one_compilation_serves_every_start():
    eager, compiled = Sliced(by_slice), None
    before = reports()
    compiled = torch.compile(eager, backend="tilewright", options={"inner": "eager"})
    for start in (3, 5, 6, 11):
        args, expected = sliced_args(2, 5, start), sliced_args(2, 5, start)
        for cache, other in zip(args[1:3], expected[1:3], strict=True):
            other.copy_(cache)
        compiled(*args)
        eager(*expected)
        for cache, other in zip(args[1:3], expected[1:3], strict=True):
            torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5)
    new = [report for report in reports() if all(report is not old for old in before)]
    assert len(new) == 2  # the first start is a number, and the others are a symbol
    assert patterns() == ["qkv_cache"]


def scattered(cache, heads, slots):
    """Writes with separate slots for each sequence."""
    cache.scatter_(1, slots[:, :, None, None].expand_as(heads), heads)


def scattered_pages(cache, heads, slots):
    """Writes with separate slots for each page of each sequence."""
    at = slots[:, None, :, None, None].expand(-1, 2, -1, *heads.shape[2:])
    cache.view(4, 2, 8, *heads.shape[2:]).scatter_(2, at % 8, heads[:, None].expand_as(at))


@pytest.mark.parametrize(
    ("write", "found", "missed"),
    [(scattered, ["qkv_cache"], set()), (scattered_pages, [], {"CACHE_LAYOUT"})],
)
def test_rows_with_slots_of_their_own_are_flat_slots(write, found, missed):
    slots = torch.tensor([[3, 0, 9], [1, 2, 4], [15, 7, 5], [0, 1, 2]])
    args = (*sliced_args(4, 3)[:3], slots)
    check_against_eager("rows", Sliced(write), args, found)
    assert codes() == missed


def strided(cache, heads, start):
    cache[: heads.shape[0], start : start + 2 * heads.shape[1] : 2] = heads


def cut_twice(cache, heads, start):
    cache[: heads.shape[0], start : start + heads.shape[1], : heads.shape[2]] = heads


@pytest.mark.parametrize("write", [strided, cut_twice])
def test_a_slice_whose_slots_are_not_known_is_left_alone(write):
    x, k_cache, v_cache, start = sliced_args(2, 5)
    wide = [torch.cat((c, c), 2) if write is cut_twice else c for c in (k_cache, v_cache)]
    check_against_eager("slice", Sliced(write), (x, *wide, start), [])
    assert codes() == {"SLICE_WRITE"}


class TwoLayers(torch.nn.Module):
    """Each layer keeps K and V in one cache."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(None) for _ in range(2))

    def forward(self, x, one, other, slots):
        for layer, cache in zip(self.layers, (one, other), strict=True):
            q, k, v = layer.qkv(x)
            store(cache[0], slots, k)
            store(cache[1], slots, v)
            x = x + q.reshape(T, -1)
        return x


def test_keys_and_values_in_one_cache_are_those_of_one_layer():
    x, k_cache, v_cache, slots = make_args()
    args = (x, *(torch.stack((k_cache, v_cache)) for _ in range(2)), slots)
    check_against_eager("two layers", TwoLayers(), args, ["qkv_cache"] * 2)


def test_rows_with_pages_and_slots_of_their_own_are_written_one_by_one():
    """Rows that have separate pages and slots are written one by one. Only rows that share one
    index can be one write."""

    def step(m, x, k_cache, v_cache, pages, slots):
        k, v = m.k_proj(x).view(2, 3, HKV, D), m.v_proj(x).view(2, 3, HKV, D)
        for row in range(2):
            k_cache[row][pages[row], slots[row]] = k[row]
            v_cache[row][pages[row], slots[row]] = v[row]
        return m.q_proj(x)

    x, *caches = (torch.randn(shape) for shape in ((2, 3, 64), *[(2, 4, 8, HKV, D)] * 2))
    index = torch.tensor([[0, 1, 2], [3, 1, 0]])
    args = (x, *caches, index, index.flip(0))
    check_against_eager("two indices", Layer(step), args, ["cache_store"] * 2)


def other_row_between(m, x, k_cache, v_cache, slots, given):
    """The next row of K is written before the first row of V."""
    q, k, v = m.qkv(x)
    k_cache[0][slots] = k
    k_cache[1][slots] = given
    v_cache[0][slots] = v
    return q


def of_rows(strides):
    """Returns caches [6, 8, HKV, D], with the given strides for K's cache."""
    x, _, v_cache, _ = make_args()
    slots = torch.tensor([3, 1, 0, 7, 5])
    k_cache = torch.zeros(6 * 8 * HKV * D).as_strided(v_cache.shape, strides)
    return x, k_cache, v_cache, slots, torch.randn(T, HKV, D)


DENSE = (8 * HKV * D, HKV * D, D, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_write_to_another_row_may_lie_between(dynamic):
    run(Layer(other_row_between), *of_rows(DENSE), dynamic=dynamic)
    assert sorted(patterns()) == ["cache_store", "qkv_cache"]


@pytest.mark.parametrize("stride", [0, HKV * D])
def test_rows_that_share_elements_are_written_in_order(stride):
    """Tests rows that share elements: one cache is expanded, and in another the rows overlap. They
    are written in order."""
    args = of_rows((stride, *DENSE[1:]))
    run(Layer(other_row_between), *args)
    assert "CACHE_WRITE" in codes()
    assert torch.equal(args[1][1][args[3]], args[4])


def test_k_and_v_at_different_starts_are_no_pair():
    def apart(cache, heads, start):
        by_slice(cache, heads, start if cache.shape[0] == 4 else start + 1)

    x, k_cache, v_cache, start = sliced_args(2, 5)
    args = (x, k_cache, torch.cat((v_cache, v_cache)), start)
    module = Sliced(apart)
    check_against_eager("apart", module, args, ["cache_store"] * 2)
    assert codes() == {"SLOT_INDEX"}


@pytest.mark.parametrize("by", ["index", "slice"])
def test_keys_and_values_in_one_row_are_told_as_that(by):
    """If one write has keys and values in one row, no write of K has a partner for V, and the
    report says so."""

    class InOneRow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(plain)

        def forward(self, x, cache, slots):
            q, k, v = self.layer.qkv(x)
            cache[slots if by == "index" else slice(0, len(x))] = torch.cat((k, v), -1)
            return q * 2

    cache = torch.zeros(64, HKV, 2 * D)
    with torch.no_grad():
        run(InOneRow(), torch.randn(T, K), cache, torch.arange(T))
    (miss,) = misses_of(reports()[-1], "qkv_cache")
    assert (miss.code, "written together" in miss.message) == ("CACHE_LAYOUT", True)


class OfTwoWidths(torch.nn.Module):
    """Values are narrower than keys. Each layer projects the result of the layer before it.

    `between` is one more write of the same activation, between the writes of keys and values.
    """

    def __init__(self, between=False):
        super().__init__()
        self.keys = torch.nn.ModuleList(torch.nn.Linear(16, 2 * 8) for _ in range(2))
        self.values = torch.nn.ModuleList(torch.nn.Linear(16, 2 * 4) for _ in range(2))
        self.between = between

    def forward(self, x, caches, slots):
        for key, value, (k_cache, v_cache, more) in zip(
            self.keys, self.values, caches, strict=True
        ):
            k_cache[slots] = key(x).view(-1, 2, 8)
            if self.between:
                more[slots] = key(x)[:, None]
            v_cache[slots] = value(x).view(-1, 2, 4)
            x = x + k_cache[slots].flatten(1) + v_cache[slots].flatten(1).repeat(1, 2)
        return x


@pytest.mark.parametrize("between", [False, True])
def test_keys_of_two_layers_are_no_pair(between):
    """The keys of two layers are no pair, although they are written at the same place in two
    caches, like K and V of one layer."""
    caches = [[torch.zeros(32, *last) for last in ((2, 8), (2, 4), (1, 16))] for _ in range(2)]
    with torch.no_grad():
        run(OfTwoWidths(between), torch.randn(3, 16), caches, torch.tensor([1, 5, 9]))
    assert patterns() == ["cache_store"] * (6 if between else 4)
    misses = misses_of(reports()[-1], "qkv")
    assert {miss.code for miss in misses} == {"LONE_WRITE"}
    unlike = [miss for miss in misses if "keys and values of one width" in miss.message]
    assert len(unlike) == 4  # `more` has one head and no twin
    assert not any(miss.is_lost for miss in unlike)


def test_a_stack_whose_dimension_is_the_cache_s_last_stays_one_write():
    """Keys and values that alternate along the cache's last dimension stay one write. For two
    writes of heads, the numbers of a head would have to be adjacent."""

    def in_turn(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        pairs = k_cache.view(-1, *k.shape[1:-1], k.shape[-1] // 2, 2)
        pairs[slots] = torch.stack((k, v), -1)[..., ::2, :]
        return q * 2

    ours, eager = (tuple(a.clone() for a in make_args()) for _ in range(2))
    layer = Layer(in_turn)
    torch.testing.assert_close(run(layer, *ours), layer(*eager), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], eager[1], rtol=1e-4, atol=1e-5)
    assert patterns() == []
    assert {miss.code for miss in misses_of(reports()[-1], "qkv_cache")} == {"CACHE_LAYOUT"}


class Convolution(torch.nn.Module):
    """Keeps the last inputs of a convolution, [batch, channels, width]. New tokens are joined to
    them after `between`."""

    def __init__(self, between):
        super().__init__()
        self.project, self.between = torch.nn.Linear(8, 8, bias=False), between

    def forward(self, x, inputs):
        new = self.between(self.project(x)).transpose(1, 2)
        inputs.copy_(torch.cat((inputs, new), -1)[..., -inputs.shape[-1] :])
        return inputs.sum()


@pytest.mark.parametrize("between", [F.silu, torch.tanh])
def test_inputs_of_a_convolution_are_no_cache(between):
    """Inputs of a convolution are no cache. New inputs are joined to earlier tokens along the last
    axis, however the new inputs were computed."""
    with torch.no_grad():
        run(Convolution(between), torch.randn(2, 3, 8), torch.zeros(2, 8, 4))
    assert (patterns(), codes()) == ([], set())


# --- one storage --------------------------------------------------------------------------------


def interleaved():
    """Returns K and V of every page next to each other, `[P, 2, S, H, D].unbind(1)`, as two
    inputs."""
    x, k_cache, v_cache, slots = make_args()
    return x, *torch.stack((k_cache, v_cache), 1).unbind(1), slots


def overlapping():
    """Returns inputs of the same shapes and strides, in which V begins half a page later."""
    x, k_cache, _, slots = make_args()
    page = k_cache[0].numel()
    pool = torch.arange(6.0 * 2 * page) / page
    views = (
        pool.as_strided(k_cache.shape, (2 * page, *k_cache.stride()[1:]), at)
        for at in (0, page // 2)
    )
    return x, *views, slots


def by_page(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    page, offset = slots // 8, slots % 8
    k_cache[page, offset] = k
    v_cache[page, offset] = v
    return q * 2


def test_two_inputs_that_interleave_on_one_storage_are_fused():
    layer, ours, eager = Layer(by_page), interleaved(), interleaved()
    torch.testing.assert_close(run(layer, *ours), layer(*eager), rtol=1e-4, atol=1e-5)
    assert patterns() == ["qkv_cache"]
    for a, b in zip(ours[1:3], eager[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_inputs_that_overlap_are_not():
    run(Layer(by_page), *overlapping())
    assert patterns() == ["cache_store"] * 2  # one behind the other
    assert "CACHE_OVERLAP" in codes()


def test_caches_that_overlap_on_a_later_call_are_written_as_the_graph_was():
    """Inputs that overlap only in a later call are written as in the original graph. No guard
    checks where inputs are in memory, so each call checks their addresses."""
    layer = Layer(by_page)
    compiled = torch.compile(layer, backend="tilewright", options={"inner": "eager"})
    compiled(*interleaved())
    assert patterns() == ["qkv_cache"]
    eager, ours = overlapping(), overlapping()
    expected, actual = layer(*eager), compiled(*ours)
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        assert torch.equal(a, b)
