"""Tests the pattern `moe`: every spelling of the routing matches and is no less accurate than the
model. Graphs that only look like a mixture do not match."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, relative_error
from tests.found import codes_of, matches_of
from tests.models.moe_idioms import ENDS, MODULES, build, exact
from tilewright.compiler import lower, reports


@pytest.mark.parametrize("name", MODULES)
def test_every_idiom_matches_and_is_no_less_accurate(name):
    torch._dynamo.reset()
    module, args = build(name)
    with torch.no_grad():
        compiled = torch.compile(
            module, backend="tilewright", fullgraph=True, options={"inner": "eager"}
        )
        fused, eager = compiled(*args), module(*args)
    found = reports()[-1]
    assert [site.op for site in matches_of(found, "fused_moe")] == ["fused_moe"], str(found)
    assert_no_worse(fused, eager, exact(module, *args), name)


@pytest.mark.parametrize("ends", ["bincount", "bincount_cut"])
def test_counts_whose_shape_is_data_match_where_they_are_captured(ends):
    module, args = build("plain", ends=ends)
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*args), module(*args)
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]
    assert_no_worse(fused, eager, exact(module, *args), ends)


def test_counts_whose_shape_is_data_end_the_graph():
    """Counts whose shape depends on data end the graph, which is torch's default. The graph after
    the break has a miss."""
    module, args = build("plain", ends="bincount")
    torch._dynamo.reset()
    with torch.no_grad():
        options = {"inner": "eager", "patterns": ["-moe_router"]}
        compiled = torch.compile(module, backend="tilewright", options=options)
        assert torch.equal(compiled(*args), module(*args))
    found = reports()[-1]
    assert "fused_moe" not in {site.op for site in matches_of(found, "fused_moe")}
    assert "EXPERT_ORDER" in codes_of(found, "fused_moe")


def test_the_public_grouped_mm_is_the_private_one():
    module, args = build("plain")
    module.multiply = lambda x, weight, ends: torch.nn.functional.grouped_mm(
        x, weight.transpose(1, 2), offs=ends
    )
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*args), module(*args)
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]
    assert_no_worse(fused, eager, exact(module, *args), "grouped_mm")


def test_experts_that_are_rows_of_a_table_are_matched():
    """The matrix of each expert is a row [N * K], which is looked up by the expert's number."""
    module, args = build("batched")

    def looked_up(x, weight, ids):
        rows = torch.index_select(weight.flatten(1), 0, ids)
        return torch.bmm(rows.view(-1, *weight.shape[1:]), x.unsqueeze(-1)).squeeze(-1)

    module.multiply_each = looked_up
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*args), module(*args)
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]
    assert_no_worse(fused, eager, exact(module, *args), "rows of a table")


SUMS = {
    "bmm": lambda y, weights: torch.bmm(weights.unsqueeze(1), y).squeeze(1),
    "matmul": lambda y, weights: (weights[:, None] @ y)[:, 0],
}


@pytest.mark.parametrize("name", SUMS)
def test_slots_are_summed_by_a_product_with_the_weights(name):
    module, args = build("einsum")
    module.sum_slots = SUMS[name]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*args), module(*args)
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]
    assert_no_worse(fused, eager, exact(module, *args), name)


def test_every_layer_of_a_chain_with_biases_is_fused():
    """The index of a layer's biases comes from the layer before, and therefore leads back to the
    GEMMs of that layer."""
    layers = [build("plain", gemm="einsum", bias=True, weigh="tokens")[0] for _ in range(2)]
    x = build("plain")[1][0]
    torch._dynamo.reset()
    with torch.no_grad():
        found = lower(torch.nn.Sequential(*layers), (x,))
        assert [site.op for site in matches_of(found, "fused_moe")] == ["fused_moe"] * 2, str(found)
        # float32 has no kernels. The miss is about a mixture, not about an adapter.
        missed = lower(torch.nn.Sequential(*layers).float(), (x.float(),))
    assert "LORA_FORM" not in {miss.code for miss in missed.misses}


@pytest.mark.parametrize("name", ["batched", "elsewhere_bias"])
def test_exported_spellings_match(name):
    """torch.export indexes rows by aten.index.Tensor, with a list of indices. Such graphs match,
    too."""
    module, args = build(name)
    torch._dynamo.reset()
    with torch.no_grad():
        exported = torch.export.export(module, args).module(check_guards=False)
        lowered = lower(exported, args)
    assert [site.op for site in matches_of(lowered, "fused_moe")] == ["fused_moe"], str(lowered)


CLAMPS = {
    "in_place": lambda ids: ids.clamp_max_(7),
    "apart": lambda ids: ids.clamp(0, 7),
    "from_above": lambda ids: ids.clamp_max(7),
}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("clamp", CLAMPS)
def test_experts_elsewhere_are_left_out_however_they_are_clamped(clamp, masked):
    """Experts on other devices are left out, whichever way their numbers are clamped. Without
    masks, their rows in the graph may hold anything, because no product has written them."""
    module, args = build("elsewhere_bias")
    module.clamp = CLAMPS[clamp]
    module.mask_of = module.mask_of if masked else lambda ids: None
    torch._dynamo.reset()
    with torch.no_grad():
        fused = torch.compile(module, backend="tilewright", options={"inner": "eager"})(*args)
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]
    assert relative_error(fused, exact(module, *args)) < 2**-7


def misses(name, change, **axes):
    """Returns the codes of the misses after `change`, which replaces one step of the module."""
    torch._dynamo.reset()
    module, args = build(name, **axes)
    change(module)
    with torch.no_grad():
        lowered = lower(module, args)
    assert "fused_moe" not in {site.op for site in matches_of(lowered, "fused_moe")}, str(lowered)
    return codes_of(lowered, "fused_moe")


def other_experts(module):
    """Has group ends of other experts than those by which the rows were sorted."""
    module.ends_of = lambda ids: (ids + 1) % module.axes.num_experts


def experts_as_bool(module):
    module.ends_of = lambda ids: ids.bool().long()


def other_tokens(module):
    module.rows_of = lambda rows: (rows + 1) % module.axes.num_tokens


def unknown_activation(module):
    module.activation = lambda gate, up: torch.sin(gate) * up


def other_clamps(module):
    module.activation = lambda gate, up: (
        (up.clamp(-2.0, 2.0) + 1)
        * (gate.clamp(max=1.0) * torch.sigmoid(gate.clamp(max=1.0) * 1.702))
    )


def overlapping_halves(module):
    inner = module.axes.inner
    module.split = lambda both: (both[..., :inner], both[..., 1 : inner + 1].flip(-1))


def weights_in_token_order(module):
    module.weights_of = lambda weights, order: weights


def no_inverse(module):
    module.combine = lambda y, order, rows, shape: y[order].view(*shape, -1)


def scaled_weight(module):
    module.weight_of = lambda weight: weight * 0.5


def summed_tokens(module):
    module.reduce = lambda out: out.sum(0, keepdim=True).expand(out.shape[0], -1, -1)[:, 0]


def doubled_sum(module):
    module.combine = lambda y, order, rows, shape: torch.zeros(
        shape[0], y.shape[1], dtype=y.dtype
    ).index_add(0, rows, y, alpha=2)


def row_too_many(module):
    module.combine = lambda y, order, rows, shape: torch.zeros(
        shape[0] + 1, y.shape[1], dtype=y.dtype
    ).index_add(0, rows, y)[: shape[0]]


def half_of_the_columns(module):
    module.combine = lambda y, order, rows, shape: torch.zeros(
        shape[0], y.shape[1], dtype=y.dtype
    ).scatter_add(0, rows[:, None].expand(-1, y.shape[1] // 2), y)


def counted_down(module):
    """Counts the rows from the end, 0, -1, -2, ..., where other forms use an inverse
    permutation."""

    def combine(y, order, rows, shape):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(0, -order.numel(), step=-1)
        return y[inverse].view(*shape, -1)

    module.combine = combine


def rounded_to_eight_bits(module):
    combine = module.combine
    module.combine = lambda y, *rest: combine(y.to(torch.float8_e4m3fn).to(y.dtype), *rest)


def rounded_inside(module):
    activation = module.activation
    module.activation = lambda gate, up: activation(gate, up).to(torch.float8_e5m2).to(gate.dtype)


def multiple_of_up(module):
    module.activation = lambda gate, up: (
        torch.add(up, 1, alpha=3) * (gate * torch.sigmoid(gate * 1.702))
    )


def summed_in_float32(module):
    module.reduce = lambda out: (out.float().sum(1), 0)[0] * 2


def weights_changed_later(module):
    """Changes the weights in place, and reads them through another view afterwards."""

    def change(weights, order):
        taken = weights[order]
        module.seen = weights.view(-1, 1)
        weights.mul_(2)
        return taken

    module.weights_of = change


def rows_of_a_held_expert_masked(module):
    module.mask_of = lambda ids: (ids >= module.axes.num_experts - 1)[:, None]


def masked_out_of_order(module):
    module.mask_of = lambda ids: (ids.flip(0) >= module.axes.num_experts)[:, None]


def clamped_too_low(module):
    """Gives the last expert the bias of another expert."""
    module.clamp = lambda ids: ids.clamp(0, module.axes.num_experts - 2)


def clamped_too_high(module):
    """Gives the first expert the bias of another expert."""
    module.clamp = lambda ids: ids.clamp(1, module.axes.num_experts - 1)


CLAMPED = (clamped_too_low, clamped_too_high)
MASKED = (rows_of_a_held_expert_masked, masked_out_of_order)
ELSEWHERE = dict.fromkeys(MASKED, "elsewhere") | dict.fromkeys(CLAMPED, "elsewhere_bias")
NEAR_MISSES = dict.fromkeys(ELSEWHERE, "EXPERT_ORDER") | {
    doubled_sum: "EXPERT_COMBINE",
    row_too_many: "EXPERT_COMBINE",
    half_of_the_columns: "EXPERT_COMBINE",
    counted_down: "EXPERT_COMBINE",
    rounded_to_eight_bits: "EXPERT_COMBINE",
    rounded_inside: "EXPERT_ACTIVATION",
    multiple_of_up: "EXPERT_ACTIVATION",
    summed_in_float32: "EXPERT_COMBINE",
    weights_changed_later: "INPUT_MUTATED",
    other_experts: "EXPERT_ENDS",
    experts_as_bool: "EXPERT_ENDS",
    other_tokens: "EXPERT_ORDER",
    unknown_activation: "EXPERT_ACTIVATION",
    other_clamps: "EXPERT_ACTIVATION",
    overlapping_halves: "EXPERT_ACTIVATION",
    weights_in_token_order: "EXPERT_COMBINE",
    no_inverse: "EXPERT_COMBINE",
    scaled_weight: "EXPERT_WEIGHT",
    summed_tokens: "EXPERT_COMBINE",
}


@pytest.mark.parametrize("change", NEAR_MISSES, ids=lambda change: change.__name__)
def test_near_misses_say_what_is_wrong(change):
    assert NEAR_MISSES[change] in misses(ELSEWHERE.get(change, "plain"), change)


def clamped_more(name, bound):
    """Has gpt-oss's activation with another upper bound for gate, up or both."""

    def activation(gate, up):
        given = {"gate": gate, "up": up}
        given[name] = given[name].clamp(max=bound(gate))
        gate, up = given["gate"].clamp(max=1.0), given["up"].clamp(-1.0, 1.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    return activation


BOUNDS = {"of_tokens": lambda gate: gate.shape[0] - 29, "of_nan": lambda gate: float("nan")}


@pytest.mark.parametrize("name", ["gate", "up"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_that_is_no_number_keeps_the_activation(bound, name):
    """A clamp stays in the graph if its bound is not a number: a symbolic size is a number only in
    a call, and a bound of NaN makes every result NaN."""
    torch._dynamo.reset()
    module, (x,) = build("interleaved")
    module.activation = clamped_more(name, BOUNDS[bound])
    compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"}, dynamic=True)
    with torch.no_grad():
        eager = module(x)
        assert torch.allclose(compiled(x), eager, atol=2**-6, equal_nan=True)
    assert not matches_of(reports()[-1], "fused_moe")
    assert "EXPERT_ACTIVATION" in codes_of(reports()[-1], "fused_moe")


@pytest.mark.parametrize(("dtype", "held"), [(torch.bfloat16, 256), (torch.float16, 2048)])
@pytest.mark.parametrize("ends", ["histc", "compared"])
def test_experts_are_counted_in_a_type_that_tells_them_apart(ends, dtype, held):
    """Experts must be counted in a dtype that distinguishes them. In bfloat16, 256 and 257 are the
    same number, so an expert would get the rows of another expert."""

    def found(num_experts):
        module, args = build("plain", ends=ends, num_experts=num_experts, hidden=16, inner=16)
        module.ends_of = lambda ids: ids.to(dtype)
        torch._dynamo.reset()
        with torch.no_grad():
            return lower(module, args)

    assert matches_of(found(held), "fused_moe")
    assert "EXPERT_ENDS" in codes_of(found(held + 1), "fused_moe")


def test_experts_that_are_counted_from_one_are_refused(monkeypatch):
    def ends(ids, ids_sorted, n):
        experts = torch.arange(1, end=n + 1)
        return torch.searchsorted(ids_sorted, experts, right=True).to(torch.int32)

    monkeypatch.setitem(ENDS, "from_one", ends)
    assert "EXPERT_ENDS" in misses("plain", lambda module: None, ends="from_one")


ROUNDED_COUNTS = {
    "histc": lambda ids, n: torch.histc(ids.bfloat16(), bins=n, min=0, max=n - 1),
    "summed": lambda ids, n: torch.nn.functional.one_hot(ids, n).bfloat16().sum(0),
    "added": lambda ids, n: torch.zeros(n, dtype=torch.int8).scatter_add(
        0, ids, torch.ones_like(ids, dtype=torch.int8)
    ),
}


@pytest.mark.parametrize("counts", ROUNDED_COUNTS)
def test_counts_in_a_type_that_does_not_hold_them_are_refused(counts, monkeypatch):
    def ends(ids, ids_sorted, n):
        return ROUNDED_COUNTS[counts](ids, n).cumsum(0, dtype=torch.int32)

    monkeypatch.setitem(ENDS, "rounded", ends)
    assert "EXPERT_ENDS" in misses("plain", lambda module: None, ends="rounded")


MIXED = {"inner": 64, "quantised": "nvfp4_table"}


@pytest.mark.parametrize("down", ["", "mxfp4_ldexp"])
def test_weights_of_two_kinds_are_refused(down):
    assert "WEIGHT_FORMAT" in misses("plain", lambda module: None, **MIXED, quantised_down=down)


def test_weights_in_an_unknown_format_are_refused():
    def change(module):
        module.weight_of = lambda weight: weight + 1

    assert "WEIGHT_FORMAT" in misses("plain", change, **MIXED)


def test_rows_that_meet_another_token_s_weights_are_refused():
    """Rows that are multiplied by another token's weights are refused. There are as many tokens as
    slots, so shapes alone do not show that the two were exchanged."""

    def change(module):
        module.combine = lambda y, order, rows, shape: (
            y[order.argsort()].view(*shape, -1).transpose(0, 1)
        )

    assert "EXPERT_COMBINE" in misses("weigh_tokens", change, num_tokens=2, num_slots=2)


def test_a_long_way_to_the_row_numbers_takes_no_long_time():
    """A long path to the row numbers is searched quickly. The experts choose their tokens, and each
    layer before them reads the previous layer twice."""

    class Deep(torch.nn.Module):
        def forward(self, x, layer, router, gate_up, down):
            for _ in range(40):
                x = x + torch.tanh(x @ layer)
            weights, rows = (x @ router).softmax(0).topk(4, 0)
            rows = rows.T.reshape(-1)
            ends = torch.arange(4, 17, 4, dtype=torch.int32)
            gate, up = torch._grouped_mm(x[rows], gate_up, offs=ends).chunk(2, -1)
            y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
            return torch.zeros_like(x).index_add(0, rows, y * weights.T.reshape(-1, 1))

    shapes = ((16, 32), (32, 32), (32, 4), (4, 32, 32), (4, 16, 32))
    torch._dynamo.reset()
    found = lower(Deep(), tuple(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes))
    assert "EXPERT_ORDER" in codes_of(found, "fused_moe")


def test_dtypes_without_a_kernel_are_refused():
    assert "DTYPE" in misses("batched", lambda module: None, dtype=torch.float32)


def test_a_value_that_others_read_is_not_absorbed():
    def change(module):
        module.escape = True

    assert "ESCAPES" in misses("plain", change)


def test_a_sum_written_in_place_under_two_names_is_refused():
    def kept_by_a_view(y, order, rows, shape):
        out = torch.zeros(shape[0], y.shape[1], dtype=y.dtype)
        flat = out.view(-1)
        out.index_add_(0, rows, y)
        return out * flat.sum()

    def change(module):
        module.combine = kept_by_a_view

    assert "EXPERT_COMBINE" in misses("plain", change)


def test_rows_written_in_place_that_others_read_stay():
    def stored_and_kept(y, order, rows, shape):
        out = torch.zeros_like(y)
        out[order] = y
        return out.view(*shape, -1) + out[0]

    def change(module):
        module.combine = stored_and_kept

    assert "EXPERT_COMBINE" in misses("plain", change)
