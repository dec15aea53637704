"""Tests statements between a projection and its cache writes: tilewright must find out which memory
such a statement reads and writes.

Each model is right under eager. If a statement changes an operand, or reads or writes a cache
between the K write and the V write, nothing may be moved past it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.agreement import flat
from tests.compiler.steps import Layer, cos_sin, make_args, rotate, store
from tests.found import matches_of, misses_of, patterns_in
from tilewright.compiler import reports
from tilewright.compiler._compat import trials
from tilewright.compiler.dataflow import access

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


MESH: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """Makes a process group of one rank, for DTensors."""
    where = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    MESH[:] = [init_device_mesh("cpu", (1,))]
    yield
    dist.destroy_process_group()


@torch._dynamo.allow_in_graph
def doubled(t):
    t.mul_(2)
    return t.sum()


@torch._dynamo.allow_in_graph
def doubled_in_a_dict(held):
    held["a"].mul_(2)
    return held["a"].sum()


@torch._dynamo.allow_in_graph
def read_in_a_dict(held):
    return held["a"].sum()


@torch._dynamo.nonstrict_trace
def doubled_nonstrict(held):
    held["a"].mul_(2)
    return held["a"].sum()


def in_a_branch(t):
    def double(t):
        t.mul_(2)
        return t.sum()

    return torch.cond(t.sum() > -1e9, double, lambda t: t.sum(), (t,))


def as_dtensor(t):
    return DTensor.from_local(t, MESH[0], [Replicate()], run_check=False)


def data_replaced(t):
    t.data = t.data * 2


# Statements that change a tensor in place, each by the name of the way in which it is written.
CHANGES = {
    "foreach": lambda t: torch._foreach_mul_([t], 0.5),
    "foreach_second": lambda t: torch._foreach_add_([torch.zeros(1), t], 1.0),
    "foreach_copy": lambda t: torch._foreach_copy_([t], [t + 1]),
    "embedding_max_norm": lambda t: F.embedding(
        torch.zeros(1, dtype=torch.long), t.view(-1, t.shape[-1]), max_norm=0.1
    ),
    "out_tuple": lambda t: torch.sort(t, 0, out=(t, torch.empty_like(t, dtype=torch.long))),
    "out_packet": lambda t: torch.ops.aten.mul(t, t, out=t),
    "out_keyword": lambda t: torch.mul(t, t, out=t),
    "vmap": lambda t: torch.vmap(lambda row: row.mul_(2))(t),
    "jvp": lambda t: torch.func.jvp(lambda a: a.mul_(2), (t,), (torch.ones_like(t),)),
    "checkpoint": lambda t: checkpoint(lambda a: a.mul_(2), t, use_reentrant=False),
    "cond": in_a_branch,
    "allow_in_graph": doubled,
    "allow_in_graph_dict": lambda t: doubled_in_a_dict({"a": t}),
    "nonstrict_trace": lambda t: doubled_nonstrict({"a": t}),
    "dtensor": lambda t: as_dtensor(t).mul_(2),
    "dtensor_local": lambda t: as_dtensor(t).to_local().mul_(2),
    "data": data_replaced,
    "data_view": lambda t: t.data.mul_(2),
    "batch_norm_statistics": lambda t: F.batch_norm(
        torch.arange(8.0).view(4, 2), t.view(-1)[:2], torch.ones(2), training=True
    ),
}

OPERANDS = {
    "x": lambda m, x, k_cache, cos: x,
    "q_weight": lambda m, x, k_cache, cos: m.q_proj.weight,
    "cos": lambda m, x, k_cache, cos: cos,
    "k_cache": lambda m, x, k_cache, cos: k_cache.view(-1, k_cache.shape[-1]),
}


PLACES = {False: "before", True: "between"}


def step_with(statement, operand, between, returned=False):
    """Makes a step that projects, rotates and stores. It applies a statement to an operand, before
    the stores or between them.

    With `returned`, the result of the statement is also a result of the step.
    """

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        cos, sin = cos_sin()
        cos = cos + 0
        k = rotate(k, cos, sin)
        if not between:
            given = statement(OPERANDS[operand](m, x, k_cache, cos))
        store(k_cache, slots, k)
        if between:
            given = statement(OPERANDS[operand](m, x, k_cache, cos))
        store(v_cache, slots, v)
        q = rotate(q, cos, sin) * 2
        return (q, given) if returned else q

    return step


def assert_as_eager(step, make=make_args):
    """Compares the outputs, arguments and weights after a call under eager and under the
    backend."""
    eager, ours = Layer(step), Layer(step)
    theirs, mine = make(), make()
    try:
        expected = eager(*theirs)
    except (
        UncapturedHigherOrderOpError
    ) as error:  # `cond` compiles its functions even when it runs eagerly
        pytest.skip(f"torch {torch.__version__} refuses it under eager: {error}")
    actual = torch.compile(ours, backend="tilewright", options={"inner": "eager"})(*mine)
    mine, theirs = ([*args, *layer.parameters()] for args, layer in ((mine, ours), (theirs, eager)))
    for a, b in zip(flat([actual, *mine]), flat([expected, *theirs]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# `test_what_changes_the_cache_between_its_writes_is_named` tests the remaining case, a cache
# between its writes.
OTHERS = [operand for operand in OPERANDS if operand != "k_cache"]
CHANGED = [
    (name, operands[row % len(operands)], between)
    for row, name in enumerate(CHANGES)
    for between, operands in ((False, [*OPERANDS]), (True, OTHERS))
]


@pytest.mark.parametrize(
    ("name", "operand", "between"),
    [pytest.param(*case, id="-".join((*case[:2], PLACES[case[2]]))) for case in CHANGED],
)
def test_what_changes_an_operand_around_the_stores_is_seen(name, operand, between):
    """Each change is made before the stores and between them, to one operand after another. The
    cases are all pairs of a change and a place, and of an operand and a place."""
    assert_as_eager(step_with(CHANGES[name], operand, between))


# Statements that only read. Before the stores they do not prevent fusion. Between the stores they
# do so only if they read a cache.
READS = {
    "dict": lambda t: read_in_a_dict({"a": t}),
    "foreach": lambda t: torch._foreach_mul([t], 0.5)[0].sum(),
    "embedding": lambda t: F.embedding(torch.zeros(1, dtype=torch.long), t.view(-1, t.shape[-1])),
    "vmap": lambda t: torch.vmap(lambda row: row * 2)(t),
    "jvp": lambda t: torch.func.jvp(lambda a: a * 2, (t,), (torch.ones_like(t),))[0],
    "checkpoint": lambda t: checkpoint(lambda a: a * 2, t, use_reentrant=False),
    "cond": lambda t: torch.cond(t.sum() > 0, lambda t: t.sum(), lambda t: t.sum() * 2, (t,)),
    "dtensor": lambda t: (as_dtensor(t) * 2).to_local(),
    "packet": lambda t: torch.ops.aten.mul(t, t),
    "batch_norm": lambda t: F.batch_norm(
        t.view(-1, t.shape[-1]), torch.zeros(t.shape[-1]), torch.ones(t.shape[-1])
    ),
}


def codes():
    return {miss.code for report in reports() for miss in misses_of(report, "qkv")}


def fused():
    return [site.pattern for report in reports() for site in matches_of(report, "qkv")]


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_hinders_nothing(name):
    """The step reads each operand once."""

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        cos, sin = cos_sin()
        cos = cos + 0
        k = rotate(k, cos, sin)
        given = [READS[name](select(m, x, k_cache, cos)) for select in OPERANDS.values()]
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return rotate(q, cos, sin) * 2, *given

    assert_as_eager(step)
    assert fused() == ["qkv_cache"], codes()


@pytest.mark.parametrize("name", READS)
def test_what_reads_the_cache_between_its_writes_is_seen(name):
    assert_as_eager(step_with(READS[name], "k_cache", between=True, returned=True))
    assert "qkv_cache" not in fused()
    assert "CACHE_READ" in codes()


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_cache_between_its_writes_is_named(name):
    assert_as_eager(step_with(CHANGES[name], "k_cache", between=True))
    assert "qkv_cache" not in fused()
    assert codes() & {"LONE_WRITE", "CACHE_READ"}


def test_a_store_through_a_dtensor_is_a_store_into_its_local_tensor():
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        sharded = as_dtensor(k_cache)
        store(k_cache, slots, k)
        sharded.mul_(0.5)
        store(v_cache, slots, v)
        return q

    assert_as_eager(step)
    assert "qkv_cache" not in fused()


def test_an_activation_that_is_a_dtensor_is_its_local_tensor():
    def step(m, x, k_cache, v_cache, slots):
        sharded = as_dtensor(x)
        q, k, v = m.qkv(sharded.to_local())
        sharded.mul_(2)
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return q

    assert_as_eager(step)
    assert "INPUT_MUTATED" in codes()


def test_what_is_taken_out_of_a_dtensor_cache_is_a_cache():
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache.to_local(), slots, k)
        store(v_cache.full_tensor(), slots, v)
        return q

    def run(layer):
        x, k_cache, v_cache, slots = make_args()
        k, v = as_dtensor(k_cache), as_dtensor(v_cache)
        return layer(x, k, v, slots), k_cache, v_cache

    ours = Layer(step)
    expected = run(ours)
    actual = run(torch.compile(ours, backend="tilewright", options={"inner": "eager"}))
    assert fused() == ["qkv_cache"], codes()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("again", ["to_local", "full_tensor", "redistribute", "whole"])
@pytest.mark.parametrize("between", ["read", "written"])
def test_a_dtensor_cache_under_another_name_between_the_writes_is_seen(between, again):
    names = {
        "to_local": lambda t: t.to_local(),
        "full_tensor": lambda t: t.full_tensor(),
        "redistribute": lambda t: t.redistribute(placements=[Replicate()]).to_local(),
        "whole": lambda t: t,
    }

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache.to_local(), slots, k)
        other = names[again](k_cache)
        seen = other * 2 if between == "read" else other.mul_(0.5)
        store(v_cache.to_local(), slots, v)
        return q, seen if again != "whole" else seen.to_local()

    def run(layer):
        x, k_cache, v_cache, slots = make_args()
        k, v = as_dtensor(k_cache), as_dtensor(v_cache)
        return *layer(x, k, v, slots), k_cache, v_cache

    ours = Layer(step)
    expected = run(ours)
    actual = run(torch.compile(ours, backend="tilewright", options={"inner": "eager"}))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert "qkv_cache" not in fused()
    assert codes() & {"CACHE_READ", "LONE_WRITE", "OPAQUE_WRITE", "CACHE_WRITE"}


def linear_of_dtensors(change):
    def step(m, x, k_cache, v_cache, slots):
        def project(weight):
            made = F.linear(as_dtensor(x), as_dtensor(weight))
            change(made)
            return made.to_local().view(5, -1, 16)

        q, k, v = (project(p.weight) for p in (m.q_proj, m.k_proj, m.v_proj))
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return q

    return step


def test_linears_of_dtensors_are_those_of_what_is_inside():
    assert_as_eager(linear_of_dtensors(lambda made: None))
    assert fused() == ["qkv_cache"], codes()


def test_a_dtensor_that_changes_before_it_is_unwrapped_is_seen():
    assert_as_eager(linear_of_dtensors(lambda made: made.mul_(2)))
    assert "qkv_cache" not in fused()


def test_a_lookup_that_is_tried_out_leaves_no_mask_behind():
    from torch.distributed.tensor import Shard

    def lookup(ids, table):
        return F.embedding(ids, table).redistribute(placements=[Replicate()]).to_local() * 2

    table = DTensor.from_local(torch.randn(8, 4), MESH[0], [Shard(0)], run_check=False)
    ids = as_dtensor(torch.tensor([1, 5]))
    compiled = torch.compile(lookup, backend="tilewright", options={"inner": "eager"})
    for _ in range(2):
        torch.testing.assert_close(compiled(ids, table), lookup(ids, table))


def test_a_function_that_cannot_be_tried_out_may_write_anything():
    """A function that cannot be tried out may write anything. This function reads data, and writes
    a cache that is not among its arguments."""
    held = {}

    @torch._dynamo.allow_in_graph
    def hidden(t):
        if t.sum().item() > -1e9:
            held["cache"].mul_(0.5)
        return t.sum()

    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, k)
        total = hidden(q)
        store(v_cache, slots, v)
        return q, total

    def make():
        args = make_args()
        held["cache"] = args[1]
        return args

    eager, ours = Layer(step), Layer(step)
    theirs = make()
    expected = eager(*theirs)
    mine = make()
    compiled = torch.compile(ours, backend="tilewright", options={"inner": "eager"})
    try:
        actual = compiled(*mine)
    except torch._dynamo.exc.TorchDynamoException:
        pytest.skip("this torch tries the function out itself")
    for a, b in zip(flat([actual, *mine]), flat([expected, *theirs]), strict=True):
        torch.testing.assert_close(a, b)


# --- tables ---------------------------------------------------------------------------------------


def overloads(name):
    """Yields ATen's overloads whose first arguments are tensors. The other overloads sort lists and
    add numbers."""
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return [o for o in found if o._schema.arguments and "Tensor" in str(o._schema.arguments[0])]


def test_what_is_taken_to_write_nothing_has_no_schema_that_writes():
    # `requires_grad_` changes a flag and no element.
    names = sorted(access._PURE - {"requires_grad_"})
    for overload in (overload for name in names for overload in overloads(name)):
        if not any(argument.is_out for argument in overload._schema.arguments):
            assert trials._written_places(overload) == [], overload


def test_what_is_taken_to_write_its_first_argument_writes_no_other():
    for name in sorted(access._WRITES_ITS_FIRST - {"setitem"}):
        for overload in overloads(name):
            assert [at for at, _ in trials._written_places(overload)] == [0], overload


# --- inputs that share memory at a later call only ------------------------------------------------


def stored(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def stored_with_a_scale(m, x, k_cache, v_cache, slots, scale):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    q = q * scale
    store(v_cache, slots, v)
    return q


def x_in_the_cache():
    x, k_cache, v_cache, slots = make_args()
    k_cache.view(-1)[: x.numel()].copy_(x.flatten())
    return k_cache.view(-1)[: x.numel()].view(x.shape), k_cache, v_cache, slots


def caches_on_top_of_each_other():
    x, k_cache, _, slots = make_args()
    pool = torch.cat((k_cache, k_cache))
    return x, pool[: len(k_cache)], pool[1 : 1 + len(k_cache)], slots


def caches_of_one_pool():
    x, k_cache, v_cache, slots = make_args()
    pool = torch.cat((k_cache, v_cache))
    return x, pool[: len(k_cache)], pool[len(k_cache) :], slots


def scale_in_the_cache():
    x, k_cache, v_cache, slots = make_args()
    return x, k_cache, v_cache, slots, k_cache.view(-1)[768 + 8 : 768 + 24]


def scale_apart():
    return *make_args(), torch.arange(16.0)


@pytest.mark.parametrize(
    ("step", "traced", "later"),
    [
        (stored, make_args, x_in_the_cache),
        (stored, make_args, caches_on_top_of_each_other),
        (stored, caches_of_one_pool, caches_on_top_of_each_other),
        (stored_with_a_scale, scale_apart, scale_in_the_cache),
    ],
)
def test_inputs_that_meet_at_a_later_call_run_unfused(step, traced, later, caplog):
    eager, ours = Layer(step), Layer(step)
    compiled = torch.compile(ours, backend="tilewright", options={"inner": "eager"})
    for make in (traced, later, traced, later):
        theirs, mine = make(), make()
        expected, actual = eager(*theirs), compiled(*mine)
        for a, b in zip(flat([actual, *mine]), flat([expected, *theirs]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert caplog.text.count("share memory in a call") == 1
    assert [r.notes for r in reports() if r.notes and "share memory" in r.notes[0]]


def test_caches_of_one_pool_stay_fused_wherever_they_lie(caplog):
    compiled = torch.compile(Layer(stored), backend="tilewright", options={"inner": "eager"})
    for make in (make_args, caches_of_one_pool, make_args):
        compiled(*make())
    assert set(fused()) == {"qkv_cache"}
    assert "share memory" not in caplog.text


def test_a_dtensor_that_lies_in_a_cache_at_a_later_call_is_seen():
    """A DTensor is seen by the address of the tensor inside it. The DTensor's own address says
    nothing."""

    def step(m, x, k_cache, v_cache, slots):
        local = x.to_local()
        q, k = m.q_proj(local).view(5, -1, 16), m.k_proj(local).view(5, -1, 16)
        store(k_cache, slots, k)
        v = m.v_proj(local).view(5, -1, 16)
        store(v_cache, slots, v)
        return q

    def wrapped(args):
        return as_dtensor(args[0]), *args[1:]

    eager, ours = Layer(step), Layer(step)
    compiled = torch.compile(ours, backend="tilewright", options={"inner": "eager"})
    for make in (make_args, x_in_the_cache, make_args):
        theirs, mine = make(), make()
        expected, actual = eager(*wrapped(theirs)), compiled(*wrapped(mine))
        for a, b in zip(flat([actual, *mine]), flat([expected, *theirs]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_caches_that_are_parameters_are_caches():
    class Caching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(stored)
            _, k_cache, v_cache, _ = make_args()
            self.k_cache = torch.nn.Parameter(k_cache, requires_grad=False)
            self.v_cache = torch.nn.Parameter(v_cache, requires_grad=False)

        def forward(self, x, slots):
            return self.layer(x, self.k_cache, self.v_cache, slots)

    eager, ours = Caching(), Caching()
    x, _, _, slots = make_args()
    expected = eager(x, slots)
    actual = torch.compile(ours, backend="tilewright", options={"inner": "eager"})(x, slots)
    assert fused() == ["qkv_cache"]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_report_that_cannot_be_written_costs_no_model(caplog):
    options = {"inner": "eager", "report": "/dev/full"}
    torch.compile(Layer(stored), backend="tilewright", options=options)(*make_args())
    assert fused() == ["qkv_cache"]
    assert "nothing could be written" in caplog.text


# --- a Python function and sizes that are symbols -------------------------------------------------


@torch._dynamo.allow_in_graph
def halved_where_long(x):
    """Halves its argument in place if it has more than 4 rows, otherwise returns a new tensor."""
    return x.mul_(0.5) if x.shape[0] > 4 else x * 0.5


@torch._dynamo.allow_in_graph
def halved(x):
    return x * 0.5


def stored_behind(change):
    def step(m, x, k_cache, v_cache, slots):
        y = change(x + 0)
        q, k, v = (p(x).view(-1, 2, 16) for p in (m.q_proj, m.k_proj, m.v_proj))
        k_cache.view(-1, *k_cache.shape[2:])[slots] = k
        v_cache.view(-1, *v_cache.shape[2:])[slots] = v
        return q * 2, y

    return step


class Projections(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        parts = (torch.nn.Linear(32, 32, bias=False) for _ in range(3))
        self.q_proj, self.k_proj, self.v_proj = parts

    def forward(self, *args):
        return self.step(self, *args)


def some_tokens(num_tokens):
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(1))
    slots = torch.arange(num_tokens)
    for tensor in (x, slots):
        torch._dynamo.mark_dynamic(tensor, 0)
    return x, torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16), slots


def test_what_a_python_function_writes_is_found_out_at_symbolic_sizes():
    model = Projections(stored_behind(halved_where_long))
    ours = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    for num_tokens in (3, 4, 6, 7):  # these sizes give two graphs: Dynamo guards the branch
        mine, theirs = some_tokens(num_tokens), some_tokens(num_tokens)
        results = [*ours(*mine), *mine], [*model(*theirs), *theirs]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert [patterns_in(report, "qkv") for report in reports()] == [["qkv_cache"]] * 2


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_python_function_of_which_nothing_is_known_is_told():
    model = Projections(stored_behind(lambda x: halved(x[x[:, 0] > 0]).sum()))
    torch.compile(model, backend="tilewright", options={"inner": "eager"})(*some_tokens(3))
    misses = [m for report in reports() for m in report.misses]
    (miss,) = (m for m in misses if m.code == "OPAQUE_CALL")
    assert "it is not known which memory halved writes" in miss.message
