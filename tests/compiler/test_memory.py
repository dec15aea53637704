"""Tests that the dataflow view makes memory explicit: reads, writes, aliases, and the meaning of
each write.

Each graph is also replayed on real tensors (see flow_check). Every node must hold the elements that
its view selects from the value that it names. Every value must equal the result of its operation on
its operands.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.flow_check import check, flow_of, numbers, returned, weight
from tests.compiler.random_graphs import Program, given_again
from tests.models.qkv_idioms import IDIOMS, build
from tilewright.compiler.dataflow.build import _Builder, build_view
from tilewright.patterns import effects
from tilewright.patterns.dataflow import REINTERPRETED

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X, W, B = numbers(4, 6), weight(8, 6), weight(8)

# --- reads and writes -----------------------------------------------------------------------------

CACHE = numbers(4, 2, 6)  # [P, S, D]


def test_a_node_that_cannot_be_read_may_have_written_any_memory(monkeypatch):
    """A node that cannot be read may have written any memory: the called function may know the
    cache by another name."""
    real = _Builder._call

    def call(self, node, name, result):
        if name == "erfinv":
            raise ArithmeticError("injected")
        real(self, node, name, result)

    monkeypatch.setattr(_Builder, "_call", call)

    def step(cache, x):
        cache[:, 0] = x
        y = torch.erfinv(x)
        return cache * 2, y

    (read,) = returned(step, CACHE.clone(), X).value.operands
    assert read.value.op == "store"
    assert read.value.node.target is torch.erfinv


def test_a_read_after_a_write_sees_the_write():
    def step(cache, x):
        cache[:, 0] = x
        return cache * 2

    out = returned(step, CACHE.clone(), X)
    (read,) = out.value.operands
    assert read.value.op == "store"
    assert read.is_whole


def test_a_read_before_a_write_does_not():
    def step(cache, x):
        before = cache * 2
        cache[:, 0] = x
        return before

    assert returned(step, CACHE.clone(), X).value.operands[0].value.op == "input"


def test_a_copy_keeps_what_it_copied():
    def step(cache, x):
        snapshot = cache.clone()
        cache[:, 0] = x
        return snapshot * 2

    assert returned(step, CACHE.clone(), X).value.operands[0].value.op == "input"


def test_detaching_in_place_changes_nothing():
    """Export writes `torch.tensor([...])` as a copy that is detached in place."""

    def step(table):
        fresh = torch.ops.aten.lift_fresh_copy.default(table)
        return torch.ops.aten.detach_.default(fresh)

    assert returned(step, X).value.op == "input"


def test_a_view_taken_before_a_write_sees_it():
    def step(cache, x):
        row = cache[:, 0]
        cache.copy_(cache + 1)
        return row * 2

    (row,) = returned(step, CACHE.clone(), X).value.operands
    assert row.value.op == "aten.add"
    assert row.effect == effects.select(effects.identity(CACHE.shape), 1, 0)


def test_a_write_through_a_view_reaches_the_base_and_other_views():
    def step(cache, x):
        flat = cache.view(8, 6)
        cache[1:3].mul_(2)
        return flat * 2

    (flat,) = returned(step, CACHE.clone(), X).value.operands
    assert flat.value.op == "store"
    assert flat.shape == (8, 6)


def test_setitem_returns_nothing_and_still_counts():
    def step(cache, x):
        cache[2] = x[:2]
        return cache.sum()

    flow = flow_of(step, CACHE.clone(), X)
    (store,) = flow.stores
    assert store.node.target is operator.setitem
    assert store.node.meta.get("example_value") is None
    assert store.store.source.shape == (2, 6)


ARITHMETIC = {
    "iadd": lambda x: operator.iadd(x, 1),
    "itruediv": lambda x: operator.itruediv(x, 2),
    ".add_": lambda x: x.add_(1),
    ".add_ with alpha": lambda x: x.add_(x, alpha=2),
    ".mul_": lambda x: x.mul_(3),
    "torch.relu_": lambda x: torch.relu_(x),
    ".clamp_": lambda x: x.clamp_(0, 5),
    ".masked_fill_": lambda x: x.masked_fill_(x > 4, 0.0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_in_place_is_the_operation_and_a_write_of_its_result(name):
    def step(x):
        y = x + 0
        ARITHMETIC[name](y)
        return y * 2

    out = returned(step, X)
    (now,) = out.value.operands
    assert now.value.op.startswith("aten.")
    assert now.value.op != "aten.add" or now.value.args[1] != 0
    assert now.is_whole


IN_PLACE_FUNCTIONS = {
    "F.relu": lambda x: F.relu(x, inplace=True),
    "F.silu": lambda x: F.silu(x, True),
    "F.hardtanh": lambda x: F.hardtanh(x, -1.0, 1.0, True),
    "nn.ReLU": torch.nn.ReLU(inplace=True),
    "out=": lambda x: torch.mul(x, 2, out=x),
}


@pytest.mark.parametrize("name", IN_PLACE_FUNCTIONS)
def test_a_function_asked_to_work_in_place_writes(name):
    def step(x):
        y = x + 0
        IN_PLACE_FUNCTIONS[name](y)
        return y * 2, y + 1

    flow = flow_of(step, X)
    first, second = (out.value.operands[0] for out in flow.outputs)
    assert first.value.op == "store"
    assert first == second


def test_new_empty_filled_by_slices_reads_as_a_concatenation():
    def step(a, b):
        k = a.new_empty(4, 10)
        k[..., 6:] = b[:, :4]
        k[..., :6] = a
        return k * 2

    (k,) = returned(step, X, X + 1).value.operands
    assert k.value.op == "aten.cat"
    pieces, axis = k.value.args
    assert axis == 1
    assert [p.shape for p in pieces] == [(4, 6), (4, 4)]


def test_new_empty_filled_through_narrow_and_copy_reads_as_a_concatenation():
    def step(a, b):
        k = torch.empty(2, 4, 6)
        k[0].copy_(a)
        k.narrow(0, 1, 1).copy_(b[None])
        return k * 2

    (k,) = returned(step, X, X + 1).value.operands
    assert k.value.op in ("aten.cat", "store")  # one slice has lost a dimension


PARTIAL = {
    "a gap": lambda k, a: (k[:, :2].copy_(a[:, :2]), k[:, 3:].copy_(a[:, 3:])),
    "an overlap": lambda k, a: (k[:, :4].copy_(a[:, :4]), k[:, 3:].copy_(a[:, 3:])),
    "every other row": lambda k, a: (k[::2].copy_(a[:2]), k[2:].copy_(a[2:])),
    "two axes": lambda k, a: (k[:, :3].copy_(a[:, :3]), k[2:].copy_(a[2:])),
    "another dtype": lambda k, a: (
        k[:, :3].copy_(a[:, :3].double()),
        k[:, 3:].copy_(a[:, 3:].double()),
    ),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_slices_that_do_not_tile_are_no_concatenation(name):
    def step(a):
        k = torch.zeros_like(a)
        PARTIAL[name](k, a)
        return k * 2

    (k,) = returned(step, X).value.operands
    assert k.value.op == "store"


def test_what_was_written_as_another_dtype_is_not_known_to_be_the_source():
    def step(cache, x):
        seen = cache.view(torch.int32)
        seen.copy_(x)  # copy_ converts x, so the cache does not have x's bits
        return cache * 2, seen * 2

    flow = flow_of(step, X.clone(), X + 1)
    (store,) = flow.stores
    assert store.store.dtype == torch.int32
    assert store.store.memory.dtype == torch.float32
    floats, ints = (out.value.operands[0].value for out in flow.outputs)
    assert floats is store
    assert ints.op == "opaque:memory"


def test_inputs_on_one_storage_do_not_hide_writes_from_each_other():
    pool = numbers(8, 6)

    def step(whole, part):
        part[0] = 7
        return whole * 2

    flow = flow_of(step, pool, pool[2:4])
    (read,) = flow.outputs[0].value.operands
    assert read.value.op == "opaque:memory"  # the value is known to have changed, but not to what
    whole, part = (flow.memory_of[n] for n in flow.memory_of if n.op == "placeholder")
    assert whole.storage == part.storage
    assert {whole.offset, part.offset} == {0, 12}


def test_inputs_split_outside_the_graph_share_a_storage_and_know_their_place():
    pool = numbers(2, 4, 6)

    def step(k, v):
        k.add_(1)
        return k + v

    flow = flow_of(step, *pool.unbind(0))
    k, v = (flow.memory_of[n] for n in flow.memory_of if n.op == "placeholder")
    assert k.storage == v.storage
    assert (k.offset, v.offset) == (0, 24)


def test_one_tensor_passed_twice_is_one_memory():
    def step(k, v):
        k[0] = 1
        return v * 2

    flow = flow_of(step, *[CACHE.clone()] * 2)
    assert flow.outputs[0].value.operands[0].value.op == "store"


@torch.library.custom_op("tilewright_tests::scale_rows", mutates_args=("rows",))
def scale_rows(rows: torch.Tensor, by: torch.Tensor) -> None:
    rows.mul_(by)


@scale_rows.register_fake
def _(rows, by):
    return None


@pytest.mark.parametrize("call", [scale_rows, torch.ops.tilewright_tests.scale_rows])
def test_a_custom_op_writes_what_its_schema_says_and_depends_on_all_it_reads(call):
    def step(x, w, cache):
        projected = F.linear(x, w)
        call(cache, projected[:, :6][:, None])
        return cache + 1, cache * 2

    flow = flow_of(step, X, W, CACHE.clone())
    one, two = (out.value.operands[0] for out in flow.outputs)
    assert one == two
    assert one.value.op == "store"
    assert one.value.projected
    (linear,) = (v for v in flow.values if v.op == "aten.linear")
    assert one.value in flow.users[linear]


def test_an_in_place_method_nobody_knows_makes_its_memory_unknown():
    def step(cache, index, source):
        cache.index_reduce_(0, index, source, "amax")
        return cache * 2

    out = returned(step, X.clone(), torch.tensor([1, 3]), X[:2] * 2)
    assert out.value.operands[0].value.op == "store"


def test_a_copying_view_reads_its_memory():
    def step(cache):
        return cache.transpose(0, 1).contiguous(), cache.view(-1)

    flow = flow_of(step, CACHE.clone())
    (memory,) = {m for n, m in flow.memory_of.items() if n.op == "placeholder"}
    readers = {node.target for _, node in flow.read[memory]}
    assert "contiguous" in readers
    assert "transpose" not in readers


# --- writes as records --------------------------------------------------------------------------

SLOTS = torch.tensor([5, 0, 7])
PAGE, OFFSET = SLOTS // 2, SLOTS % 2
K = numbers(3, 3, 4, start=50)  # [T, H, D]
PAGES = numbers(4, 2, 3, 4)  # [P, S, H, D]
HEADS_FIRST = numbers(4, 3, 2, 4)  # [P, H, S, D]
PAIR = numbers(4, 2, 2, 3, 4)  # [P, 2, S, H, D]


def flat(cache):
    return cache.view(-1, *cache.shape[2:])


def setitem(cache, at, k):
    cache[at] = k


# The inputs of `write`: the cache, the shape of the target, the indexed dimensions, and the shape
# of the source.
SET = (PAGES, (8, 3, 4), [0], (3, 3, 4))  # all slots are in one dimension
WRITES = {
    "setitem on a view": (lambda c, k: setitem(flat(c), SLOTS, k), *SET),
    "index_put_": (lambda c, k: flat(c).index_put_((SLOTS,), k), *SET),
    "index_put_ by keyword": (
        lambda c, k: torch.index_put_(input=flat(c), indices=(SLOTS,), values=k),
        *SET,
    ),
    "index_copy_": (lambda c, k: flat(c).index_copy_(0, SLOTS, k), *SET),
    "index_copy_ by keyword": (
        lambda c, k: flat(c).index_copy_(dim=-3, index=SLOTS, source=k),
        *SET,
    ),
    "scatter_": (
        lambda c, k: flat(c).scatter_(0, SLOTS[:, None, None].expand_as(k), k),
        *SET,
    ),
    "page and offset": (
        lambda c, k: setitem(c, (PAGE, OFFSET), k),
        PAGES,
        (4, 2, 3, 4),
        [0, 1],
        (3, 3, 4),
    ),
    "head major": (
        lambda c, k: setitem(c, (PAGE, slice(None), OFFSET), k),
        HEADS_FIRST,
        (4, 3, 2, 4),
        [0, 2],
        (3, 3, 4),
    ),
    "every head by index": (
        lambda c, k: setitem(c, (PAGE[:, None], torch.arange(3), OFFSET[:, None]), k),
        HEADS_FIRST,
        (4, 3, 2, 4),
        [0, 1, 2],
        (3, 3, 4),
    ),
    "index_copy_ along the third": (
        lambda c, k: c.index_copy_(2, OFFSET[:2], k[:2].transpose(0, 1).expand(4, 3, 2, 4)),
        HEADS_FIRST,
        (4, 3, 2, 4),
        [2],
        (2, 4, 3, 4),
    ),
    "slices and an index": (
        lambda c, k: setitem(c, (slice(0, 2), slice(None), OFFSET[:2]), k[:, :2]),
        HEADS_FIRST,
        (2, 3, 2, 4),
        [2],
        (2, 2, 3, 4),
    ),
    "between an index": (
        lambda c, k: setitem(c, (PAGE, 1, OFFSET), k),
        PAIR,
        (4, 2, 3, 4),
        [0, 1],
        (3, 3, 4),
    ),
    "K and V stacked": (
        lambda c, k: setitem(c, (PAGE, slice(None), OFFSET), torch.stack([k, k + 1], 1)),
        PAIR,
        (4, 2, 2, 3, 4),
        [0, 2],
        (3, 2, 3, 4),
    ),
    "unbound": (
        lambda c, k: setitem(c.unbind(1)[1], (PAGE, OFFSET), k),
        PAIR,
        (4, 2, 3, 4),
        [0, 1],
        (3, 3, 4),
    ),
    "slices": (
        lambda c, k: setitem(c, (slice(1, 2), 0), k[0]),
        PAGES,
        (1, 3, 4),
        [],
        (1, 3, 4),
    ),
    "narrow and copy_": (
        lambda c, k: c.narrow(0, 1, 3)[:, 0].copy_(k),
        PAGES,
        (3, 3, 4),
        [],
        (3, 3, 4),
    ),
    "as another dtype": (
        lambda c, k: setitem(flat(c.view(torch.int32)), SLOTS, k.view(torch.int32)),
        *SET,
    ),
    "converted by the write": (
        lambda c, k: setitem(c.view(torch.int32), (slice(0, 3), 0), k),
        PAGES,
        (3, 3, 4),
        [],
        (3, 3, 4),
    ),
    "copy_ that broadcasts": (
        lambda c, k: c[:3].copy_(k[:, None]),
        PAGES,
        (3, 2, 3, 4),
        [],
        (3, 2, 3, 4),
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_recorded_by_target_index_and_source(name):
    write, cache, target, index, source = WRITES[name]

    def step(cache, k):
        write(cache, k)
        return cache.sum()

    (value,) = flow_of(step, cache.clone(), K).stores
    store = value.store
    assert store.note == ""
    assert store.target.shape == target
    assert sorted(store.index) == index
    assert store.source.shape == source
    assert not store.accumulate


@pytest.mark.parametrize(
    "write",
    [
        lambda c, k: flat(c).index_put_((SLOTS,), k, accumulate=True),
        lambda c, k: flat(c).index_add_(0, SLOTS, k),
        lambda c, k: flat(c).scatter_add_(0, SLOTS[:, None, None].expand_as(k), k),
    ],
)
def test_a_write_that_adds_says_so(write):
    def step(cache, k):
        write(cache, k)
        return cache.sum()

    (value,) = flow_of(step, PAGES.clone(), K).stores
    assert value.store.accumulate


UNKNOWN = {
    "a number": (lambda c, k: setitem(flat(c), SLOTS, 7.0), ""),
    "fill_": (lambda c, k: c[0].fill_(3), "it fills the memory with a number"),
    "zero_": (lambda c, k: c.zero_(), "it fills the memory with a number"),
    "another width": (lambda c, k: setitem(c.view(torch.int16)[0], 0, 7), REINTERPRETED),
    "every element its own": (
        lambda c, k: flat(c).scatter_(0, (k % 8).long(), k),
        "it scatters element by element",
    ),
    "a number scattered": (
        lambda c, k: flat(c).scatter_(0, SLOTS[:, None, None], 7.0),
        "scatters a number",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_write_of_unknown_content_still_counts_and_says_why(name):
    write, note = UNKNOWN[name]

    def step(cache, k):
        write(cache, k)
        return cache * 2

    flow = flow_of(step, PAGES.clone(), K)
    (value,) = flow.stores
    assert value.store.source is None
    assert value.store.note == note
    assert flow.outputs[0].value.operands[0].value is value


# --- whole models, and models nobody would write --------------------------------------------------


@pytest.mark.parametrize("name", ["stacked", "max_blocks", "fp8_bytes", "per_head_static"])
def test_the_view_of_a_whole_model_is_what_happened(name):
    assert name in IDIOMS
    module, args = build(name)
    flow = flow_of(module, *args)
    assert flow.stores
    assert not flow.unknown


@pytest.mark.parametrize("seed", range(0, 240, 20))
def test_the_view_of_random_programs_is_what_happened(seed):
    for offset in range(20):
        program = Program(seed + offset, steps=14)
        flow = build_view(program.graph)
        check(flow, program.module, given_again(program.inputs))


def test_the_check_can_fail(monkeypatch):
    """The control: a view that ignores writes must fail the check."""
    monkeypatch.setattr("tilewright.compiler.dataflow.memory.MemoryMap.write", lambda *args: None)

    def step(cache, x):
        cache[:, 0] = x
        return cache * 2

    with pytest.raises(AssertionError, match="is not"):
        flow_of(step, CACHE.clone(), X)
