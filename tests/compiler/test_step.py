"""Compares the bytes of a step with sums that were computed by hand, and the floor with a stored
benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen.moe.dots import UP_DOTTED
from tilewright.codegen.targets import get_target
from tilewright.compiler import lower
from tilewright.compiler.report import Site, times
from tilewright.compiler.report.step import FUSED, INDUCTOR, KINDS, LIBRARY, step_of
from tilewright.compiler.report.work import reached, share_of_experts
from tilewright.ops.attention.arguments import AttentionArguments, cache_read
from tilewright.ops.contract import get_op

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200 = get_target("sm90")
F32 = 4
LAYERS = 3

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def on_meta(build):
    """Returns a model on the meta device."""
    with torch.device("meta"):
        return build().requires_grad_(False)


def lowered(model, *args, **options):
    given = [torch.empty(a, device="meta") if isinstance(a, tuple) else a for a in args]
    return lower(model, given, target="sm90", **options)


class Tiny(nn.Module):
    """Has two products with a bias, and an operation between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).add(1.0))


def test_every_byte_of_a_small_model():
    step = step_of(lowered(on_meta(Tiny), (2, 8)))
    up, between, down = step.parts
    x, wide, out = 2 * 8 * F32, 2 * 16 * F32, 2 * 4 * F32
    assert [p.kind for p in (up, between, down)] == [LIBRARY, INDUCTOR, LIBRARY]
    assert [p.name for p in (up, between, down)] == ["linear", "relu, add", "linear"]
    assert (up.amounts.weights, up.amounts.activations) == ((8 * 16 + 16) * F32, x + wide)
    assert (between.amounts.weights, between.amounts.activations) == (0, 2 * wide)
    assert (between.amounts.nodes, between.amounts.launches) == (2, 1)
    assert (down.amounts.weights, down.amounts.activations) == (16 * 4 * F32, wide + out)
    total = step.total
    assert total.bytes == (8 * 16 + 16 + 16 * 4) * F32 + x + wide + 2 * wide + wide + out
    assert total.floor_us == pytest.approx(1e6 * total.weights / H200.hbm_bytes_per_s)
    started = 3e6 * (H200.launch_s + times.FILL_S)
    assert total.starts_us == pytest.approx(started)
    # The step moves so few bytes that nearly all of its time is the starts of kernels.
    assert started < total.modelled_us < started + 0.01
    assert total.bound == "starts of kernels"
    assert step.left_share == 1.0


def test_many_tokens_are_bound_by_their_products():
    model = on_meta(lambda: nn.Linear(1024, 1024, bias=False).bfloat16())
    x = torch.empty(65536, 1024, dtype=torch.bfloat16, device="meta")
    (product,) = step_of(lowered(model, x)).parts
    seconds = 2 * 65536 * 1024**2 / H200.flops_per_s("bf16")
    assert product.amounts.floor_us == pytest.approx(1e6 * seconds)


def test_the_grouped_product_of_transformers_counts():
    """gpt-oss calls this operator with a weight that the graph decodes from MXFP4 codes."""
    pytest.importorskip("transformers.integrations.moe", reason="registers the operator")

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 1024, 1024, dtype=torch.bfloat16))

        def forward(self, x, ends):
            return torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs=ends)

    x = torch.empty(65536, 1024, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    (product,) = step_of(lowered(on_meta(Experts), x, ends)).parts
    seconds = 2 * 65536 * 1024**2 / H200.flops_per_s("bf16")
    assert product.amounts.floor_us == pytest.approx(1e6 * seconds)


def test_products_of_activations_are_no_floor():
    step = step_of(lowered(lambda a, b: a @ b, (64, 64), (64, 64)))
    assert step.total.floor_us == 0.0
    assert step.total.activations == 3 * 64 * 64 * F32


def test_what_stands_on_both_sides_of_a_product_is_two_kernels():
    """Operations before and after a product are two kernels: the residual is written before the
    product and read after it."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            x = x * 2
            return x + self.linear(x.sigmoid())

    step = step_of(lowered(on_meta(Residual), (2, 8)))
    rows = 2 * 8 * F32
    assert [p.kind for p in step.parts] == [INDUCTOR, LIBRARY, INDUCTOR]
    # The first part reads x and writes two results. The product reads one and writes one. The last
    # part reads two operands and writes the sum.
    assert [p.amounts.activations for p in step.parts] == [3 * rows, 2 * rows, 3 * rows]


def test_a_lookup_reads_its_rows_and_a_view_what_it_selects():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 8)
            self.register_buffer("both", torch.ones(2, 8))

        def forward(self, ids):
            return self.table(ids) * self.both[0]

    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    step = step_of(lowered(on_meta(Lookup), ids))
    assert step.total.weights == 3 * 8 * F32 + 8 * F32
    assert step.total.activations == 3 * 8 + 3 * 8 * F32


def test_two_halves_of_a_weight_are_read_once():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 8))

        def forward(self, x):
            gate, up = self.weight.chunk(2)
            return x * gate.sum() + up.sum() + self.weight.sum()

    step = step_of(lowered(on_meta(Halves), (2, 8)))
    assert step.total.weights == 16 * 8 * F32


def test_what_nobody_uses_is_not_counted():
    class Wasteful(Tiny):
        def forward(self, x):
            self.down(self.up(x))
            return self.up(x)

    step = step_of(lowered(on_meta(Wasteful), (2, 8)))
    assert step.total.weights == (8 * 16 + 16) * F32


ROW = 8 * F32


def put_rows(cache, rows, at):
    cache.index_copy_(0, at, rows)


def set_rows(cache, rows, at):
    cache[at] = rows


def set_slice(cache, rows, at):
    cache[3:5] = rows


def scatter_rows(cache, rows, at):
    cache.scatter_(0, at[:, None].expand(2, 8), rows)


def put_a_number(cache, rows, at):
    cache.index_put_((at,), rows[0, 0])


def fill_rows(cache, rows, at):
    cache[1:3].zero_()


def add_rows(cache, rows, at):
    cache.index_add_(0, at, rows)


def read_behind(cache, rows, at):
    cache.index_copy_(0, at, rows)
    return cache.sum(-1)


def from_the_same(cache, rows, at):
    cache[:2] = cache[2:4]


def write_what_it_made(cache, rows, at):
    made = rows * 2
    made[at] = rows
    return made


@pytest.mark.parametrize(
    ("write", "read", "moved"),
    [
        # First the bytes of the cache that are read, then the bytes of the given rows, of their
        # indices, and of the written rows.
        (put_rows, 0, 2 * ROW + 16 + 2 * ROW),
        (set_rows, 0, 2 * ROW + 16 + 2 * ROW),
        (set_slice, 0, 2 * ROW + 2 * ROW),
        (scatter_rows, 0, 2 * ROW + 16 + 2 * ROW),
        (put_a_number, 0, F32 + 16 + 2 * ROW),
        (fill_rows, 0, 2 * ROW),
        (add_rows, 2 * ROW, 2 * ROW + 16 + 2 * ROW),
        (read_behind, 4096 * ROW, 2 * ROW + 16 + 2 * ROW + 4096 * F32),
        (from_the_same, 2 * ROW, 2 * ROW),
        (write_what_it_made, 0, 2 * ROW + 16 + 2 * ROW),
    ],
)
def test_a_write_in_place_moves_the_rows_it_writes(write, read, moved):
    """A write in place moves only the rows that it writes. The rest of the target stays, and is not
    read."""
    at = torch.zeros(2, dtype=torch.int64, device="meta")
    total = step_of(lowered(write, (4096, 8), (2, 8), at)).total
    assert (total.caches, total.activations) == (read, moved)


def test_sums_in_place_read_and_write_all_once():
    def add(cache, bias):
        cache.add_(bias).mul_(2)

    total = step_of(lowered(add, (64, 8), (8,))).total
    assert (total.caches, total.activations) == (64 * ROW, ROW + 64 * ROW)


def test_sizes_that_are_symbols_are_named_and_not_guessed():
    x = torch.empty(2, 8, device="meta")
    torch._dynamo.mark_dynamic(x, 0)
    step = step_of(lowered(on_meta(Tiny), x))
    assert len(step.symbols) == 1
    assert step.total.activations == 0
    assert step.total.weights == (8 * 16 + 16 + 16 * 4) * F32
    torch._dynamo.reset()  # it remembers which sizes were dynamic
    assert step_of(lowered(on_meta(Tiny), (2, 8))).symbols == ()


def test_tokens_present_up_to_what_fits_or_a_window():
    def read(mask="causal", window=0, table=None, pages=3):
        k, v = torch.empty(pages, 16, 2, 8), torch.empty(pages, 16, 2, 4)
        given = {"scale": 1.0, "mask": mask, "window": window, "block_table": table}
        return cache_read(AttentionArguments(torch.empty(3, 4, 8), k, v, **given))

    token = 2 * (8 + 4) * F32
    assert [read().bytes_of(n) for n in (0, 5, 99)] == [0, 3 * 5 * token, 3 * 16 * token]
    assert read("sliding_window", 4).bytes_of(5) == 3 * 4 * token
    table = torch.zeros(2, 5, dtype=torch.int32)
    assert read(table=table, pages=7).bytes_of(99) == 2 * 80 * token


def test_attention_multiplies_what_a_query_sees():
    """The last 3 of 5 tokens present are new. They see 3, 4 and 5 tokens."""
    k, v = torch.empty(2, 16, 2, 8), torch.empty(2, 16, 2, 4)
    read = cache_read(AttentionArguments(torch.empty(6, 4, 8), k, v, scale=1.0))
    assert (read.sequences, read.queries) == (2, 3)
    assert read.flops_of(5) == 2 * (3 + 4 + 5) * 2 * 4 * (8 + 4)
    assert read.flops_of(99) == 2 * (14 + 15 + 16) * 2 * 4 * (8 + 4)


def latent_work(tokens, keys):
    """Returns the work that `mla_prefill` declares for 2 sequences, each of `tokens` queries and
    `keys` keys."""
    batch, heads, nope, rope, v_dim, rank = 2, 16, 128, 64, 128, 512
    with torch.device("meta"):
        q = torch.empty(batch * tokens, heads, nope + rope, dtype=torch.bfloat16)
        latent = torch.empty(batch * keys, rank, dtype=torch.bfloat16)
        k_rope = torch.empty(batch * keys, rope, dtype=torch.bfloat16)
        weight = torch.empty(heads * (nope + v_dim), rank, dtype=torch.bfloat16)
    op = get_op("tilewright::mla_prefill_dense")
    given = {"v_dim": v_dim, "scale": 1.0, "num_sequences": batch, "cos": None, "rope_on": "q"}
    return op.work_of(op.arguments(q, latent, k_rope, weight, **given))


def test_few_queries_of_latents_make_no_keys():
    """With few queries, each query is multiplied by the up-projection, and only the latents of
    present tokens count. With many queries, keys are computed from every latent, written and
    read."""
    heads, nope, rope, v_dim, rank = 16, 128, 64, 128, 512
    few = latent_work(1, 2048)
    assert few.flops == 2 * 2 * heads * rank * (nope + v_dim)
    assert few.cache.bytes_of(1000) == 2 * 1000 * (rank + rope) * 2
    assert few.cache.flops_of(1000) == 2 * 1000 * 2 * heads * (2 * rank + rope)
    assert few.scratch == 0
    many = latent_work(1024, 2048)
    assert many.flops == 2 * 2 * 2048 * rank * heads * (nope + v_dim)
    assert many.cache.bytes_of(1024) == 2 * 2048 * (rank + rope) * 2
    assert many.cache.pair_flops == 2 * heads * (nope + rope + v_dim)
    assert many.scratch == 2 * 2 * 2048 * heads * (nope + v_dim) * 2


def test_a_view_between_two_operations_hands_nothing_on():
    """A value that is only read through a view inside the same kernel is not written to memory."""

    class Viewed(nn.Module):
        def forward(self, x):
            return x.mul(2).view(4, 4).add(1)

    total = step_of(lowered(Viewed(), (2, 8))).total
    assert total.activations == 2 * 16 * F32


def test_experts_reached():
    assert reached(1, 8 / 128) == pytest.approx(1 / 16)
    assert reached(16, 8 / 128) == pytest.approx(1 - (15 / 16) ** 16)
    assert reached(0, 0.5) == 0.0


def test_a_device_with_some_of_the_experts_meets_its_share_of_the_slots():
    shapes = {"x": "bfloat16[1,2048]", "experts": 32, "slots": 8}
    whole = Site("moe", "fused_moe", "", "", shapes, "", "")
    assert share_of_experts(whole) == pytest.approx(8 / 32)
    part = replace(whole, shapes=shapes | {"routed": 128})
    assert share_of_experts(part) == pytest.approx(8 / 128)


def test_dot_products_read_an_expert_once_for_each_token():
    shapes = {"x": "bfloat16[4,4096]", "experts": 8, "slots": 2}
    kernel = SimpleNamespace(
        spec=SimpleNamespace(template=UP_DOTTED.template, kernel=UP_DOTTED.name)
    )
    dotted = Site("moe", "fused_moe", "", "", shapes, "", "", kernels=(kernel,))
    assert share_of_experts(dotted) == 1.0
    assert share_of_experts(replace(dotted, kernels=())) == pytest.approx(1 - 0.75**4)
    few = replace(dotted, shapes=shapes | {"experts": 64})
    assert share_of_experts(few) == pytest.approx(4 * 2 / 64)


class Leftover(nn.Module):
    """Has a product and a buffer that is written. `reads` says whether the result depends on the
    buffer."""

    def __init__(self, reads):
        super().__init__()
        self.up, self.reads = nn.Linear(8, 16), reads

    def forward(self, x):
        rows = torch.empty_like(x)
        rows[:, 1:] = x.flip(0)[:, 1:]
        return self.up(rows if self.reads else x)


def test_a_buffer_that_nothing_reads_is_not_written():
    (product,) = step_of(lowered(on_meta(lambda: Leftover(reads=False)), (2, 8))).parts
    assert product.kind == LIBRARY
    kinds = [p.kind for p in step_of(lowered(on_meta(lambda: Leftover(reads=True)), (2, 8))).parts]
    assert set(kinds) == {INDUCTOR, LIBRARY}


@pytest.fixture(scope="module")
def llama():
    pytest.importorskip("transformers", reason="the zoo needs transformers")
    from tilewright.tools.zoo import build_zoo_model

    torch._dynamo.reset()
    model, args, kwargs = build_zoo_model("llama3-8b", layers=LAYERS)
    return lower(model, args, kwargs, target="sm90")


def test_llama_has_the_floor_that_was_kept(llama):
    """The benchmark counts the weights of the model itself, and uses the copy rate of its run. This
    test computes the time of the benchmark's 8 layers from its last two layers, which are equal."""
    rows = json.loads((RESULTS / "llama3_8b_end_to_end.json").read_text("utf-8"))["rows"]
    (kept,) = [r for r in rows if (r["batch"], r["tokens"], r["kind"]) == (1, 1, "mask")]
    assert kept["layers"] == 8
    step = step_of(llama, present=1001)
    (alike,) = [layer for layer in step.layers if len(layer.scopes) > 1]
    total = step.total + alike.total.times(8 - LAYERS)
    per_layer = 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336 + 2 * 4096
    others = 128256 * 4096 + 4096 + 4096 + 128  # the head, a norm, one token, frequencies as fp32
    assert total.weights == 2 * (8 * per_layer + others)
    assert abs(total.caches - 8 * 2 * 1001 * 1024 * 2) < 1000  # and counters
    assert total.floor_us == pytest.approx(kept["floor"], rel=0.02)
    assert 0.9 * kept["tilewright"] < total.modelled_us < 1.1 * kept["tilewright"]
    assert (step.kind, total.bound) == ("decode, dense", "reading weights")


def test_caches_count_where_their_tokens_are_known(llama):
    unknown, known = step_of(llama), step_of(llama, present=1001)
    assert unknown.total.caches < 1000 < known.total.caches
    assert unknown.total.cache_capacity == known.total.cache_capacity
    full = step_of(llama, present=10**6)
    assert full.total.caches == full.total.cache_capacity


def test_equal_layers_are_one_and_kinds_add_up(llama):
    step = step_of(llama, present=1001)
    assert sum(len(layer.scopes) for layer in step.layers if layer.scope) == LAYERS
    assert max(len(layer.scopes) for layer in step.layers) == LAYERS - 1
    of_kinds = [step.of(kind) for kind in KINDS]
    assert sum(a.bytes for a in of_kinds) == step.total.bytes
    assert sum(a.modelled_us for a in of_kinds) == pytest.approx(step.total.modelled_us)
    assert step.of(LIBRARY).weights == 128256 * 4096 * 2  # the weight of the head
    assert step.left_share == pytest.approx(1 - step.of(FUSED).modelled_us / step.total.modelled_us)
    nodes = {site.node for site in llama.matches}
    assert {p.node for p in step.parts if p.kind == FUSED} <= nodes


def test_the_data_is_json(llama):
    data = json.loads(json.dumps(step_of(llama).as_dict()))
    assert data["present"] is None
    assert data["total"]["weights"] == step_of(llama).total.weights
