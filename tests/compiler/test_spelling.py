"""Tests that every way to write an operation or a view gets its one canonical form.

Each graph is also replayed on real tensors (see flow_check).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.flow_check import flow_of, numbers, returned, weight
from tilewright.compiler import lower
from tilewright.compiler.dataflow.build import build_view
from tilewright.patterns import effects

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X, W, B = numbers(4, 6), weight(8, 6), weight(8)

LINEARS = {
    "F.linear": lambda x, w, b: F.linear(x, w, b),
    "F.linear by keyword": lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm by keyword": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.t()),
    "x @ w.T": lambda x, w, b: x @ w.T,
    "x @ w.t()": lambda x, w, b: x @ w.t(),
    "x @ w.mT": lambda x, w, b: x @ w.mT,
    "matmul": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)),
    "matmul by keyword": lambda x, w, b: torch.matmul(input=x, other=w.permute(1, 0)),
    ".matmul": lambda x, w, b: x.matmul(w.T),
    "mm": lambda x, w, b: torch.mm(x, w.T),
    ".mm": lambda x, w, b: x.mm(w.T),
    "mm by keyword": lambda x, w, b: torch.mm(input=x, mat2=w.T),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_product_with_a_weight_is_a_linear(name):
    out = returned(LINEARS[name], X, W, B)
    assert out.value.op == "aten.linear"
    x, w, bias = out.value.args
    assert x.value.op == "input"
    assert x.is_whole
    assert w.value.op == "constant"
    assert w.is_whole
    with_bias = "linear" in name or "addmm" in name
    assert (bias.value.op if with_bias else bias) == ("constant" if with_bias else None)


def test_a_product_with_a_weight_of_the_other_order_is_a_linear_of_its_transpose():
    out = returned(lambda x, w: x @ w, X, weight(6, 8))
    assert out.value.op == "aten.linear"
    assert out.value.args[1].effect == effects.permute(effects.identity((6, 8)), (1, 0))


def test_a_slice_that_no_view_expresses_is_listed_as_unknown():
    flow = flow_of(lambda x: (x + 1).t().flatten()[2:9:2], X)
    assert [node.op for node in flow.unknown] == ["call_function"]
    assert not flow_of(lambda x: (x + 1).t().flatten()[4:], X).unknown


@pytest.mark.parametrize("scale", ["alpha", "beta"])
def test_a_scaled_addmm_is_not_a_linear(scale):
    out = returned(lambda x, w, b: torch.addmm(b, x, w.T, **{scale: 2}), X, W, B)
    assert out.value.op == "aten.addmm"


HEADS = numbers(2, 3, 12)
# Pairs of spellings by name. Both spellings of a pair must select the same elements of the input.
PAIRS = {
    "split by int": (lambda x: x.split(4, dim=-1)[1], lambda x: x[..., 4:8]),
    "split by list": (lambda x: torch.split(x, [4, 8], -1)[1], lambda x: x.narrow(-1, 4, 8)),
    "split positional": (lambda x: x.split([4, 8], 2)[0], lambda x: x[:, :, :4]),
    "chunk": (lambda x: x.chunk(3, dim=-1)[2], lambda x: x[..., -4:]),
    "torch.chunk": (lambda x: torch.chunk(x, 3, -1)[0], lambda x: x[:, :, 0:4]),
    "uneven chunk": (lambda x: x.chunk(5, dim=-1)[3], lambda x: x[..., 9:12]),
    "tensor_split": (lambda x: x.tensor_split(3, dim=-1)[1], lambda x: x[..., 4:8]),
    "unbind": (lambda x: x.view(2, 3, 3, 4).unbind(2)[1], lambda x: x[..., 4:8]),
    "torch.unbind": (lambda x: torch.unbind(x)[1], lambda x: x[1]),
    "list index": (lambda x: x.view(2, 3, 3, 4)[..., [-2], :], lambda x: x[..., 4:8].unsqueeze(2)),
    "select": (lambda x: x.select(1, -1), lambda x: x[:, 2]),
    "strided slice": (lambda x: x[..., 1::2], lambda x: x.view(2, 3, 6, 2)[..., 1]),
    "None index": (lambda x: x[:, None], lambda x: x.unsqueeze(1)),
    "Ellipsis alone": (lambda x: x[...], lambda x: x),
    "past the end": (lambda x: x[..., 8:99], lambda x: x[..., -4:]),
    "before the beginning": (lambda x: x[..., -15:8], lambda x: x[..., :8]),
    "all before the beginning": (lambda x: x[..., :-15], lambda x: x[..., :0]),
    "view": (lambda x: x.view(6, 12), lambda x: x.reshape(-1, 12)),
    "view as": (lambda x: x.view_as(numbers(6, 12)), lambda x: x.flatten(0, 1)),
    "view of a size": (lambda x: x.view(torch.Size([6, 12])), lambda x: x.reshape((6, 12))),
    "unflatten": (lambda x: x.unflatten(-1, (3, -1)), lambda x: x.view(2, 3, 3, 4)),
    "transpose": (lambda x: x.transpose(1, 2), lambda x: x.permute(0, 2, 1)),
    "swapaxes": (lambda x: x.swapaxes(-1, 0), lambda x: torch.permute(x, (2, 1, 0))),
    "movedim": (lambda x: x.movedim(0, -1), lambda x: x.permute(1, 2, 0)),
    "movedim of two": (lambda x: x.movedim((0, 1), (1, 2)), lambda x: x.permute(2, 0, 1)),
    "mT": (lambda x: x.mT, lambda x: x.transpose(-1, -2)),
    "squeeze": (lambda x: x.unsqueeze(0).squeeze(), lambda x: x),
    "squeeze dim": (lambda x: x[:, :1].squeeze(1), lambda x: x[:, 0]),
    "expand": (lambda x: x[:, :1].expand(2, 5, 12), lambda x: x[:, :1].expand(-1, 5, -1)),
    "expand_as": (lambda x: x[:, :1].expand_as(x), lambda x: torch.broadcast_to(x[:, :1], x.shape)),
    "repeat_kv": (
        lambda x: x.view(6, 3, 4).repeat_interleave(2, dim=1),
        lambda x: x.view(6, 3, 4)[:, :, None].expand(6, 3, 2, 4).reshape(6, 6, 4),
    ),
    "torch.repeat_interleave": (
        lambda x: torch.repeat_interleave(x, 3, dim=0),
        lambda x: x[:, None].expand(2, 3, 3, 12).reshape(6, 3, 12),
    ),
    "repeat": (
        lambda x: x.repeat(1, 2, 1),
        lambda x: x[:, None].expand(2, 2, 3, 12).reshape(2, 6, 12),
    ),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)),
    "clone": (lambda x: x.clone(), lambda x: x),
    "same dtype": (lambda x: x.to(torch.float32), lambda x: x.float()),
    "type_as": (lambda x: x.type_as(x), lambda x: x.to(x)),
    "idle dropout": (lambda x: F.dropout(x, 0.5, training=False), lambda x: x),
    "idle dropout in place": (lambda x: F.dropout(x, 0.5, False, True), lambda x: x),
    "identity module": (torch.nn.Identity(), lambda x: x),
}


#: Calls that no table has, each with a call from a table that selects the same elements.
UNLISTED = {
    "numpy_T": (torch.ops.aten.numpy_T, lambda x: x.permute(2, 1, 0)),
    "aten.mT": (torch.ops.aten.mT, lambda x: x.transpose(1, 2)),
    "aten.adjoint": (torch.adjoint, lambda x: x.transpose(1, 2)),
    "aten.swapaxes": (lambda x: torch.ops.aten.swapaxes(x, 0, 2), lambda x: x.permute(2, 1, 0)),
    "atleast_3d": (lambda x: torch.atleast_3d(x[0]), lambda x: x[0].unsqueeze(-1)),
    "hsplit": (lambda x: torch.hsplit(x, 3)[1], lambda x: x[:, 1:2]),
    "dsplit": (lambda x: torch.dsplit(x, [4, 8])[1], lambda x: x[..., 4:8]),
    "tile": (lambda x: x.tile(1, 2, 1), lambda x: x.repeat(1, 2, 1)),
    "data": (lambda x: x.data, lambda x: x),
    "real": (torch.real, lambda x: x),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_a_call_in_no_table_is_a_view_where_all_it_does_is_to_select(name):
    one, other = UNLISTED[name]
    flow = flow_of(lambda x: (one(x) + 1, other(x) + 1), HEADS)
    views = [out.value.args[0] for out in flow.outputs]
    assert [v.value.op for v in views] == ["input", "input"]
    assert views[0].effect == views[1].effect
    assert not flow.unknown


@pytest.mark.parametrize("name", UNLISTED)
def test_a_call_in_no_table_is_a_view_of_symbolic_sizes_too(name):
    one, other = UNLISTED[name]
    flows = []

    def backend(gm, example_inputs):
        flows.append(build_view(gm.graph))
        return gm.forward

    given = HEADS.clone()
    torch._dynamo.mark_dynamic(given, 0)
    torch.compile(lambda x: (one(x) + 1, other(x) + 1), backend=backend, fullgraph=True)(given)
    (flow,) = flows
    views = [out.value.args[0] for out in flow.outputs]
    assert [v.value.op for v in views] == ["input", "input"]
    assert views[0].effect == views[1].effect
    assert not flow.failed


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (torch.fliplr, HEADS),  # no chain of views goes backwards
        (lambda x: x.diagonal(), HEADS),
        # as_strided selects from the memory, not from the tensor.
        (lambda x: x.as_strided((2, 2), (1, 2)), HEADS),
        (torch.linalg.norm, HEADS),
        (
            torch.ops.aten.matrix_H,
            torch.randn(3, 4, dtype=torch.complex64),
        ),  # the result is conjugated
        (
            lambda x: torch.ops.aten.view.dtype(x, torch.int32),
            HEADS,
        ),  # the result has other numbers
    ],
)
def test_a_call_in_no_table_that_does_more_than_select_is_no_view(function, given):
    flow = flow_of(lambda x: function(x) + 1, given)
    assert flow.outputs[0].value.args[0].value.op != "input"


@pytest.mark.parametrize("name", PAIRS)
def test_spellings_of_a_view_select_the_same(name):
    one, other = PAIRS[name]
    # The sum keeps Dynamo from returning the input itself.
    first, second = (flow_of(lambda x, f=f: f(x) + 1, HEADS) for f in (one, other))
    views = [flow.outputs[0].value.args[0] for flow in (first, second)]
    assert [v.value.op for v in views] == ["input", "input"]
    assert views[0].effect == views[1].effect
    assert not first.unknown


PLAIN = {
    "aten.neg": [lambda x: -x, lambda x: x.neg(), lambda x: torch.negative(x)],
    "aten.mul": [lambda x: x * 2, lambda x: 2 * x, lambda x: torch.multiply(x, 2)],
    "aten.add": [lambda x: x + 2, lambda x: x.add(2), lambda x: torch.add(input=x, other=2)],
    "aten.sub": [lambda x: x - 2, lambda x: torch.subtract(x, 2)],
    "aten.div": [lambda x: x / 2, lambda x: torch.true_divide(x, 2), lambda x: x.div(2)],
    "aten.floor_divide": [lambda x: x // 2, lambda x: torch.floor_divide(x, 2)],
    "aten.remainder": [lambda x: x % 2, lambda x: torch.remainder(x, 2), lambda x: x.remainder(2)],
    "aten.pow": [lambda x: x**2, lambda x: x.pow(2), lambda x: torch.pow(x, 2)],
    "aten.softmax": [
        lambda x: F.softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
    ],
    "aten.silu": [lambda x: F.silu(x), torch.nn.SiLU()],
    "aten.cat": [
        lambda x: torch.cat((x, x), -1),
        lambda x: torch.concat([x, x], dim=1),
        lambda x: torch.cat(tensors=(x, x)),
        lambda x: torch.stack((x, x), dim=-1),
    ],
    "aten.rms_norm": [lambda x: F.rms_norm(x, (6,)), torch.nn.RMSNorm(6, eps=1e-5)],
    "aten.index_select": [lambda x: x.index_select(0, torch.tensor([2, 0]))],
    "cast": [
        lambda x: x.to(torch.float64),
        lambda x: x.double(),
        lambda x: x.type(torch.float64),
        lambda x: x.to(dtype=torch.float64),
        lambda x: x.to("cpu", torch.float64),
    ],
}


@pytest.mark.parametrize(
    ("op", "function"), [(op, f) for op, forms in PLAIN.items() for f in forms]
)
def test_spellings_of_an_operation_have_one_name(op, function):
    assert returned(function, X).value.op == op


def test_an_unknown_operation_is_named_and_stays_opaque():
    flow = flow_of(lambda x: torch.cdist(x, x) + torch.linalg.det(x @ x.T), X)
    assert [v.op for v in flow.values if "cdist" in v.op or "det" in v.op]


def test_the_list_index_of_several_positions_is_a_gather_not_a_slice():
    out = returned(lambda x: x[[2, 0]] + 1, X)
    assert out.value.args[0].value.op != "input"
    mixed = returned(lambda x: x.view(2, 2, 6)[[0], :, [1]] + 1, X)
    assert mixed.value.args[0].value.op == "opaque:getitem"


def test_a_call_in_no_table_that_keeps_a_symbolic_size_is_read():
    flows = []

    def backend(gm, example_inputs):
        flows.append(build_view(gm.graph))
        return gm.forward

    def repeated(x, counts):
        return x.new_ones(3).repeat_interleave(counts, output_size=x.shape[0]) + 1

    rows = X.clone()
    torch._dynamo.mark_dynamic(rows, 0)
    counts = torch.tensor([1, 0, X.shape[0] - 1])
    torch.compile(repeated, backend=backend, fullgraph=True)(rows, counts)
    (flow,) = flows
    (value,) = (v for v in flow.values if "interleave" in v.op)
    assert value.op == "aten.repeat_interleave"
    assert value.kwargs["output_size"] == value.shape[0]
    assert not flow.unknown


def test_a_dimension_that_is_an_argument_of_the_graph_is_read():
    """If a number in a call changes, for example after a graph break, Dynamo turns it into a
    symbol, which is an argument of the graph."""

    def step(x, dim):
        return torch.unsqueeze(x, dim).movedim(dim, 0).transpose(0, dim) * 2

    (graph,) = lower(step, (torch.ones(3, 4), 2), dynamic=True).graphs
    assert any(node.target in ("unsqueeze", torch.unsqueeze) for node in graph.before.graph.nodes)
    assert graph.misses == ()


@pytest.mark.parametrize("dim", [0, -1])
def test_a_concatenation_has_pieces_of_one_rank(dim):
    """torch.cat leaves out tensors of shape [0]. An empty cache of transformers is such a
    tensor."""
    x = torch.randn(4, 3, 2)
    joined = returned(lambda x: torch.cat((torch.tensor([]), x, x), dim), x).value
    assert joined.op == "aten.cat"
    empty = tuple(0 if axis == dim % 3 else size for axis, size in enumerate(x.shape))
    assert [piece.shape for piece in joined.args[0]] == [empty, (4, 3, 2), (4, 3, 2)]


@pytest.mark.parametrize(("shape", "dim"), [((0, 5), 1), ((5, 0), 0), ((0, 5), 0)])
def test_a_concatenation_of_nothing_has_pieces_of_one_rank(shape, dim):
    x = torch.empty(shape)
    joined = returned(lambda x: torch.cat((torch.tensor([]), x), dim), x).value
    empty = tuple(0 if axis == dim else size for axis, size in enumerate(shape))
    assert [piece.shape for piece in joined.args[0]] == [empty, shape]


@pytest.mark.parametrize(("first", "dim"), [((0,), 0), ((4, 0), 1)])
def test_hstack_joins_along_the_dimension_that_its_first_tensor_has(first, dim):
    """torch looks only at the first tensor. If that tensor is of rank one, the call makes rows,
    whatever the rank of the others is."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    empty = torch.empty(first)
    joined = returned(lambda x, y: torch.hstack((empty, x, y)), x, y).value
    assert joined.args[1] == dim
    nothing = [0, 4] if dim == 0 else [4, 0]
    assert [list(piece.shape) for piece in joined.args[0]] == [nothing, [4, 4], [4, 4]]
