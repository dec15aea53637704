"""Tests the patterns `linear_activation` and `linear_residual`.

An MLP in any spelling becomes two ops, and is no less accurate than eager. Forms that the patterns
do not match are advice, or are not reported.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import matches_of, misses_of
from tests.models.norms import gemma_row_norm as gemma_norm
from tests.models.norms import hf_row_norm as hf_norm
from tilewright.codegen.mlp.plan import MOST_GATED_TOKENS, MOST_TOKENS
from tilewright.compiler import lower, reports

BATCH, TOKENS, K, N = 2, 3, 64, 96


def inputs(tokens=TOKENS, dtype=torch.bfloat16):
    """Returns x [B, S, K], gate and up [2N, K], down [K, N], biases [2N] and [K], norm weight [K]
    and residual [B, S, K]."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    x, residual = normal(BATCH, tokens, K), normal(BATCH, tokens, K)
    weights = normal(2 * N, K, scale=K**-0.5), normal(K, N, scale=N**-0.5)
    return [x, *weights, normal(2 * N), normal(K), normal(K) + 1, residual]


def run(function, args, symbols=()):
    """Returns the report of a compiled function, after a check that its result is no less accurate
    than eager's. `symbols` are the arguments whose dimension 1 is dynamic."""
    torch._dynamo.reset()
    ours = cloned(args)
    for argument in symbols:
        torch._dynamo.mark_dynamic(ours[argument], 1)
    with torch.no_grad():
        expected = function(*cloned(args))
        exact = function(*(upcast(a) for a in args))
        actual = torch.compile(function, backend="tilewright", options={"inner": "eager"})(*ours)
    assert_no_worse(actual, expected, exact, function.__name__)
    return reports()[-1]


def site_of(report, pattern):
    (site,) = matches_of(report, pattern)
    assert misses_of(report, "mlp") == []
    return site


# --- activations ----------------------------------------------------------------------------------


def separate(x, both, *_):
    return F.silu(F.linear(x, both[:N])) * F.linear(x, both[N:])


def turned_round(x, both, *_):
    return F.linear(x, both[N:]) * F.silu(F.linear(x, both[:N]))


def packed(x, both, *_):
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return up * F.silu(gate)


def up_first(x, both, *_):
    hidden = F.linear(x, both)
    return F.gelu(hidden[..., N:]) * hidden[..., :N]


def in_turn(x, both, _, bias, *__):
    hidden = F.linear(x, both, bias)
    return F.gelu(hidden[..., ::2], approximate="tanh") * hidden[..., 1::2]


def by_hand(x, both, *_):
    gate = x @ both[:N].t()
    return gate * torch.sigmoid(gate) * (x @ both[N:].t())


def in_single_precision(x, both, *_):
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def rows(x, both, *_):
    x = x.reshape(-1, K)
    return F.relu(F.linear(x, both[:N])) * F.linear(x, both[N:])


def plain(x, both, _, bias, *__):
    return F.relu(F.linear(x, both, bias)).square()


def transposed(x, both, _, bias, *__):
    hidden = torch.addmm(bias, x.view(-1, K), both.t()).view(*x.shape[:-1], -1)
    cubic = hidden + 0.044715 * torch.pow(hidden, 3.0)
    return 0.5 * hidden * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))


def of_constant_tensors(x, both, *_):
    """Writes the activation as books do: torch.sqrt(torch.tensor(2 / pi)), with every other
    constant as a tensor."""
    half, one, cube = (torch.tensor(n) for n in (0.5, 1.0, 0.044715))
    hidden = F.linear(x, both)
    cubic = hidden + cube * torch.pow(hidden, 3.0)
    return half * hidden * (one + torch.tanh(torch.sqrt(torch.tensor(2.0 / math.pi)) * cubic))


GATED = {
    separate: "silu", turned_round: "silu", packed: "silu", up_first: "gelu",
    in_turn: "gelu_tanh", by_hand: "silu", in_single_precision: "silu", rows: "relu",
}  # fmt: skip
PLAIN = {plain: "relu_squared", transposed: "gelu_tanh", of_constant_tensors: "gelu_tanh"}


@pytest.mark.parametrize("function", [*GATED, *PLAIN])
def test_activations(function):
    shapes = site_of(run(function, inputs()), "linear_activation").shapes
    assert shapes["activation"] == (GATED | PLAIN)[function]
    assert (shapes["gate"] == "none") == (function in PLAIN)
    assert shapes["x"] == f"bfloat16[{BATCH * TOKENS},{K}]"


@pytest.mark.parametrize(
    "constant",
    [
        lambda *_: 0.05,
        lambda *_: torch.tensor(0.05),
        lambda *_: torch.tensor(0.044715, dtype=torch.bfloat16),  # it is rounded
        lambda x, residual: residual[0, 0, 0] * 0 + 0.044715,  # it is computed from an input
        lambda *_: torch.div(torch.tensor(0.044715), 1, rounding_mode="floor"),
    ],
    ids=["another", "tensor", "rounded", "computed", "floored"],
)
def test_a_cubic_with_another_factor_is_no_gelu(constant):
    def other(x, both, *rest):
        hidden = F.linear(x, both)
        cubic = hidden + constant(x, rest[-1]) * torch.pow(hidden, 3.0)
        return 0.5 * hidden * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))

    assert matches_of(lower(other, inputs()), "mlp") == []


def test_a_count_of_tokens_that_is_a_symbol():
    site = site_of(run(separate, inputs(), symbols=[0]), "linear_activation")
    assert site.shapes["x"] == f"bfloat16[T,{K}]"


# --- norms ----------------------------------------------------------------------------------------


def own_norm(x, weight):
    return F.rms_norm(x, (K,), weight, 1e-5)


def weightless_norm(x, weight):
    return F.rms_norm(x, (K,), eps=1e-5)


def layer_norm(x, weight):
    return F.layer_norm(x, (K,), weight)


def mlp_of(norm, also=lambda x, normed: 0):
    def mlp(x, both, down, bias, _, weight, residual):
        normed = norm(x, weight)
        gate, up = F.linear(normed, both).chunk(2, dim=-1)
        return F.silu(gate) * up + also(x, normed)

    return mlp


@pytest.mark.parametrize("norm", [hf_norm, gemma_norm, own_norm, weightless_norm])
def test_a_norm_that_nobody_else_reads_is_part_of_it(norm):
    assert site_of(run(mlp_of(norm), inputs()), "linear_activation").shapes["norm"] == "rms"


@pytest.mark.parametrize(
    ("norm", "also"),
    [
        (hf_norm, lambda x, normed: normed.sum()),
        (layer_norm, lambda x, normed: 0),
    ],
    ids=["read by another", "layer norm"],
)
def test_another_norm_stays_in_the_graph(norm, also):
    assert site_of(run(mlp_of(norm, also), inputs()), "linear_activation").shapes["norm"] == "no"


def test_what_else_reads_a_part_of_a_norm_keeps_that_part():
    """A cast of the norm's result that another operation reads stays in the graph."""

    def shared(x, both, down, bias, _, weight, residual):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        gate, up = F.linear(weight * normed.to(x.dtype), both).chunk(2, dim=-1)
        return F.silu(gate) * up + wide.sum().to(x.dtype)

    assert site_of(run(shared, inputs()), "linear_activation").shapes["norm"] == "rms"


def test_float16_is_normed_before_it_is_multiplied():
    """In float16, x is normalised before it is multiplied, because numbers before the norm may be
    outside the range of float16."""
    args = inputs(dtype=torch.float16)
    args[0] *= 1e4
    site = site_of(run(mlp_of(hf_norm), args), "linear_activation")
    assert site.shapes["norm"] == "no"


def test_for_many_tokens_a_norm_stays_by_itself():
    site = site_of(run(mlp_of(hf_norm), inputs(), symbols=[0]), "linear_activation")
    assert site.shapes["norm"] == "no"


# --- sums -----------------------------------------------------------------------------------------


def added(x, both, down, bias, down_bias, weight, residual):
    return residual + F.linear(both_of(x, both), down)


def both_of(x, both):
    """Returns [B, S, N], which no pattern matches."""
    return torch.tanh(F.linear(x, both[:N]))


def added_behind(x, both, down, bias, down_bias, weight, residual):
    return F.linear(both_of(x, both), down, down_bias) + residual


def scaled(x, both, down, bias, down_bias, weight, residual):
    return residual + F.linear(both_of(x, both), down, down_bias) * 0.22


def added_in_place(x, both, down, bias, down_bias, weight, residual):
    out = F.linear(both_of(x, both), down)
    out += residual
    return out


def some_columns(x, both, down, bias, down_bias, weight, residual):
    return residual + F.linear(residual, both)[..., :K]


def by_head(x, both, down, bias, down_bias, weight, residual):
    """Adds a gated embedding of each head to a value."""
    heads = F.linear(both_of(x, both), down, down_bias).unflatten(-1, (4, -1))
    return heads + residual.unflatten(-1, (4, -1)) * x[..., :4, None]


def by_head_of_some_columns(x, both, down, bias, down_bias, weight, residual):
    return residual.unflatten(-1, (2, -1)) + F.linear(residual, both)[..., :K].unflatten(
        -1, (2, -1)
    )


@pytest.mark.parametrize(
    "function",
    [added, added_behind, scaled, added_in_place, some_columns, by_head, by_head_of_some_columns],
    ids=lambda f: f.__name__,
)
def test_sums(function):
    shapes = site_of(run(function, inputs()), "linear_residual").shapes
    assert shapes.get("scale", 1.0) == (0.22 if function is scaled else 1.0)
    assert shapes["bias"] == ("yes" if function in (added_behind, scaled, by_head) else "no")


@pytest.mark.parametrize("norm", [hf_norm, gemma_norm, own_norm, weightless_norm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_of_what_is_added_is_part_of_it(norm, dtype):
    def post_normed(x, both, down, bias, down_bias, weight, residual):
        return residual + norm(F.linear(both_of(x, both), down, down_bias), weight)

    shapes = site_of(run(post_normed, inputs(dtype=dtype)), "linear_residual").shapes
    assert (shapes["norm"], shapes["bias"]) == ("rms", "yes")


@pytest.mark.parametrize("factor", [1.0, 0.5773502691896258, -2.0])
@pytest.mark.parametrize("norm", [hf_norm, gemma_norm])
def test_a_number_behind_the_norm_is_part_of_it(norm, factor):
    """A factor after the norm is a part of the op. (A model may weight a residual by its depth in
    this way.) The factor of the residual itself stays outside."""

    def weighed(x, both, down, bias, down_bias, weight, residual):
        return norm(F.linear(both_of(x, both), down), weight) * factor + residual * 0.8

    shapes = site_of(run(weighed, inputs()), "linear_residual").shapes
    assert (shapes["norm"], shapes.get("scale", 1.0)) == ("rms", factor)


def test_for_a_symbol_of_tokens_the_norm_stays_in_the_graph():
    def post_normed(x, both, down, bias, down_bias, weight, residual):
        return residual + hf_norm(F.linear(x, both[:K]), weight)

    assert matches_of(run(post_normed, inputs(), symbols=[0, 6]), "mlp") == []


def test_of_a_sum_of_two_linears_one_is_taken():
    def parallel(x, both, down, bias, down_bias, weight, residual):
        return F.linear(both_of(x, both), down) + F.linear(residual, both[:K])

    assert site_of(run(parallel, inputs()), "linear_residual").op == "linear_residual"


def test_a_whole_mlp():
    def mlp(x, both, down, bias, down_bias, weight, residual):
        gate, up = F.linear(hf_norm(x, weight), both).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    report = run(mlp, inputs())
    found = {site.pattern: site for site in matches_of(report, "mlp")}
    assert found.keys() == {"linear_activation", "linear_residual"}
    assert found["linear_activation"].shapes["norm"] == "rms"


# --- what is left alone ---------------------------------------------------------------------------


def other_rows(x, both, down, bias, down_bias, weight, residual):
    return F.tanh(F.linear(x, both[:N])) * F.linear(residual, both[N:])


def gate_and_up_of_different_x(x, both, down, bias, down_bias, weight, residual):
    return F.silu(x + residual) * F.linear(residual, both[:K])


def computed_weight(x, both, *_):
    return F.silu(F.linear(x, both * 2))


def a_vector_is_added(x, both, down, *_):
    return F.linear(both_of(x, both), down) + x[0, 0] * 2


def added_twice(x, both, down, bias, down_bias, weight, residual):
    return torch.add(residual, F.linear(both_of(x, both), down), alpha=2)


def read_again(x, both, down, bias, down_bias, weight, residual):
    out = F.linear(both_of(x, both), down)
    return (residual + out) * out


def layer_normed_before_the_sum(x, both, down, bias, down_bias, weight, residual):
    return residual + layer_norm(F.linear(both_of(x, both), down), weight)


def norm_read_again(x, both, down, bias, down_bias, weight, residual):
    normed = hf_norm(F.linear(both_of(x, both), down), weight)
    return (residual + normed) * normed


def product_read_again(x, both, down, bias, down_bias, weight, residual):
    out = F.linear(both_of(x, both), down)
    return (residual + hf_norm(out, weight)) * out


def other_normed_before_the_sum(x, both, down, bias, down_bias, weight, residual):
    """Has a norm of a gated result, whose rows are not the rows of a linear."""
    return residual + hf_norm(F.linear(both_of(x, both), down) * x.tanh(), weight)


def gated_before_the_sum(x, both, down, bias, down_bias, weight, residual):
    return residual + F.linear(both_of(x, both), down) * x.tanh()


def heads_behind_each_other(x, both, down, bias, down_bias, weight, residual):
    """Has the rows of the weight in another order. To read them in this order, each call would copy
    the weight."""
    heads = F.linear(both_of(x, both), down).unflatten(-1, (4, -1)).mT
    return heads + residual.unflatten(-1, (4, -1)).mT


def heads_before_tokens(x, both, down, bias, down_bias, weight, residual):
    heads = F.linear(both_of(x, both), down).unflatten(-1, (4, -1)).transpose(1, 2)
    return heads + residual.unflatten(-1, (4, -1)).transpose(1, 2)


def normed_over_heads(x, both, down, bias, down_bias, weight, residual):
    heads = F.linear(both_of(x, both), down).unflatten(-1, (2, K // 2))
    return residual.unflatten(-1, (2, K // 2)) + F.rms_norm(heads, (K // 2,), eps=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        other_rows, gate_and_up_of_different_x, computed_weight, a_vector_is_added,
        added_twice, read_again, other_normed_before_the_sum, gated_before_the_sum,
        heads_behind_each_other, heads_before_tokens,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_left_alone(function):
    report = run(function, inputs())
    assert matches_of(report, "mlp") == misses_of(report, "mlp") == []


#: Maps a sum after a norm that the op does not support to words of the miss.
OTHER_NORMS = {
    layer_normed_before_the_sum: "a layer norm",
    norm_read_again: "with other readers",
    normed_over_heads: f"{K // 2} columns",
    product_read_again: "with other readers",
}


@pytest.mark.parametrize("function", OTHER_NORMS, ids=lambda f: f.__name__)
def test_another_norm_before_the_sum_is_told(function):
    report = run(function, inputs())
    assert matches_of(report, "mlp") == []
    (miss,) = misses_of(report, "mlp")
    assert (miss.code, miss.weight) == ("SUM_PATH", "advice")
    assert OTHER_NORMS[function] in miss.message


def test_a_miss_of_a_sum_speaks_for_both_of_its_linears():
    """One miss stands for both linears of a sum, which belong to an attention and an MLP side by
    side. Each call decodes the weights of both."""

    def parallel(x, both, down, bias, down_bias, weight, residual):
        halves = F.linear(both_of(x, both), down * 2), F.linear(residual, both[:K] * 2)
        return halves[0] + halves[1]

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(inputs()[1:-1])

        def forward(self, x, residual):
            return parallel(x, *self.weights, residual)

    torch._dynamo.reset()
    given = inputs()
    lowered = lower(Parallel().requires_grad_(False), (given[0], given[-1]))
    (miss,) = misses_of(lowered, "mlp")
    assert (miss.pattern, miss.code) == ("linear_residual", "LINEAR_FORM")
    assert lowered.census.unaccounted == ()
    assert sum(point.account == "miss" for point in lowered.census.points) == 2


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_a_weight_whose_sizes_are_symbols_is_told(stored):
    """A weight with symbolic sizes is reported. It occurs with `dynamic=True`, if weights are
    arguments."""
    torch._dynamo.reset()
    x, _, down, *_, residual = inputs()
    x, down = x.new_ones(BATCH, TOKENS, N), down.to(stored)
    step = lambda x, w, r: r + F.linear(x, w.to(x.dtype))  # noqa: E731
    lowered = lower(step, (x, down, residual), dynamic=True, patterns=["linear_residual"])
    (miss,) = lowered.misses
    assert not lowered.matches, str(lowered)
    assert (miss.code, miss.weight) == ("LINEAR_FORM", "advice")
    assert "its weight has symbolic sizes" in miss.message


def test_a_norm_before_the_sum_wants_a_number_of_tokens():
    args = inputs()
    hidden = torch.randn(BATCH, TOKENS, N).to(args[0].dtype)
    step = lambda x, w, norm, r: r + own_norm(F.linear(x, w), norm)  # noqa: E731
    for dynamic in (False, True):
        torch._dynamo.reset()
        rows, residual = hidden.clone(), args[-1].clone()
        if dynamic:
            torch._dynamo.mark_dynamic(rows, 1)
            torch._dynamo.mark_dynamic(residual, 1)
        report = lower(step, (rows, args[2], args[5], residual))
        assert len(report.matches) == (not dynamic)
        assert [(m.code, m.is_lost) for m in report.misses] == [("UNSUPPORTED", False)] * dynamic


def test_one_of_several_weights_in_a_tensor_is_an_expert_s():
    args = inputs()
    args[1] = args[1].view(2, N, K)

    def of_stack(x, both, *_):
        return F.silu(F.linear(x, both[1]))

    assert matches_of(run(of_stack, args), "mlp") == []
    args[1] = args[1].flatten(0, 1)
    assert matches_of(run(lambda x, both, *_: F.silu(F.linear(x, both[N:])), args), "mlp") != []


@pytest.mark.parametrize("compute", ["rolled", "rounded", "changed"])
def test_weights_that_each_call_computes_are_told_whatever_computes_them(compute):
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(inputs()[1][:K], requires_grad=False)

        def forward(self, x, residual):
            weight = self.weight
            if compute == "changed":
                weight.T[..., -1] = 0
            made = {"rolled": weight.roll(1, 0), "rounded": weight.round(decimals=1)}
            return residual + F.linear(x, made.get(compute, weight))

    given = inputs()
    torch._dynamo.reset()
    lowered = lower(Computed(), (given[0], given[-1]))
    (miss,) = misses_of(lowered, "linear_residual")
    assert (miss.code, "computed in every call" in miss.message) == ("LINEAR_FORM", True)
    assert not lowered.census.unaccounted


def test_many_tokens_are_left_to_the_library():
    for function, most in ((separate, MOST_GATED_TOKENS), (added, MOST_TOKENS)):
        few, many = (inputs(tokens) for tokens in (most // BATCH, most // BATCH + 1))
        assert matches_of(lower(function, few), "mlp") != []
        torch._dynamo.reset()
        lowered = lower(function, many)
        assert matches_of(lowered, "mlp") == misses_of(lowered, "mlp") == []


def products_are_read(x, both, *_):
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up + up.sum()


@pytest.mark.parametrize(
    ("function", "dtype", "code"),
    [
        (products_are_read, torch.bfloat16, "ESCAPES"),
        (separate, torch.float32, "DTYPE"),
        (added, torch.float32, "DTYPE"),
    ],
)
def test_misses_are_advice(function, dtype, code):
    report = run(function, inputs(dtype=dtype))
    assert matches_of(report, "mlp") == []
    (miss,) = misses_of(report, "mlp")
    assert (miss.code, miss.is_lost) == (code, False)


class Formed(nn.Module):
    """An MLP of two halves. Each half is a function of x and its weight."""

    def __init__(self, up, down):
        super().__init__()
        self.halves = up, down
        self.up = nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x):
        up, down = self.halves
        return x + down(self, F.silu(up(self, x, self.up)), self.down)


def as_stored(m, x, weight):
    return F.linear(x, weight)


def computed(m, x, weight):
    return F.linear(x, weight * m.scale)


def scaled_behind(m, x, weight):
    return F.linear(x, weight) * m.scale


#: Maps a form in which a half multiplies to words of the miss.
FORMS = {
    computed: ("computed in every call, by aten.mul", "when the model is loaded"),
    scaled_behind: ("scales its result", "multiply the weight by this factor once"),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_weight_in_another_form_is_told(form):
    """The half in the other form is missed by name, and the other half is fused."""
    message, hint = FORMS[form]
    for halves, pattern in (
        ((form, as_stored), "linear_activation"),
        ((as_stored, form), "linear_residual"),
    ):
        torch._dynamo.reset()
        model = Formed(*halves).requires_grad_(False)
        report = lower(model, (torch.zeros(2, 64, dtype=torch.bfloat16),))
        (miss,) = misses_of(report, "mlp")
        assert (miss.pattern, miss.code, miss.weight) == (pattern, "LINEAR_FORM", "advice")
        assert message in miss.message
        assert hint in miss.hint
        assert len(matches_of(report, "mlp")) == 1
