"""GEMMs of every token with every expert's weight: bmm, einsum and matmul in one normal form.

    y[e, t, n] = sum_k x[t, k] * weight[e, n, k]        the first: x the same for all experts,
    y[e, t, n] = sum_k x[e, t, k] * weight[e, n, k]     or scaled by expert; the second

Roles of dimensions: e experts, t tokens, n outputs, k inputs; a product's dimensions may come in
any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Dim
from tilewright.patterns.recognise.gemm import Side, named_product
from tilewright.patterns.recognise.linear import Columns, columns_along


@dataclass(frozen=True)
class DenseGemm:
    """x [E, T, K] (repeating over experts where it is the same for all) times weight [E, N, K].

    end: the value that holds the result (after a bias, if any); roles: those of its dimensions, a
    permutation of "etn". bias [E, N] or None.
    """

    x: View
    weight: View
    bias: View | None
    end: Value
    roles: str
    absorbed: tuple[Value, ...]

    @property
    def is_shared(self) -> bool:
        """Whether all experts see the same x."""
        return all(a.axis is None for a in self.x.effect.dims[0])

    def columns_of(self, part: View) -> Columns | None:
        """The outputs (first, number, step) that a view of the result takes of every row, its
        dimensions in the result's order; None for another view."""
        axis = self.roles.index("n")
        sizes, whole = list(part.shape), list(self.end.shape)
        if part.value is not self.end or len(sizes) != 3:
            return None
        sizes[axis] = whole[axis]
        in_place = sizes == whole and any(a.axis == axis for a in part.effect.dims[axis])
        return columns_along(part, axis) if in_place else None


def dense_gemms(value: Value, flow: Dataflow) -> Iterator[DenseGemm]:
    """The GEMMs with all experts that a value can be read as: either operand may be the weight."""
    product = named_product(value)
    if product is None or len(product.result) != 3 or not product.names_differ:
        return
    for x, weight in product.either_way:
        gemm = _as_gemm(value, x, weight, product.result)
        if gemm is not None:
            yield _with_bias(gemm, flow)


def _as_gemm(value: Value, x: Side, weight: Side, result: str) -> DenseGemm | None:
    if len(weight.names) != 3 or weight.view.value.projected:
        return None
    xs, ws = x.dims, weight.dims
    summed = [n for n in ws if n in xs and n not in result]
    tokens = [n for n in xs if n in result and (n not in ws)]
    e = next((name for name, dim in ws.items() if _is_first_axis(dim)), None)
    outputs = [n for n in ws if n in result and n != e]
    if e is None or e not in result or len(summed) != 1 or len(tokens) != 1 or len(outputs) != 1:
        return None
    (k,), (t,), (n,) = summed, tokens, outputs
    if set(xs) - {e, t, k} or xs.get(n) is not None:
        return None
    experts = effects.product(a.length for a in ws[e])
    over = xs.get(e, (effects.Atom(None, 0, experts),))
    x_view = x.view.with_dims(over, xs[t], xs[k])
    weight_view = weight.ordered((e, n, k))
    roles = "".join({e: "e", t: "t", n: "n"}[name] for name in result)
    return DenseGemm(x_view, weight_view, None, value, roles, (value,))


def _is_first_axis(dim: Dim) -> bool:
    return len(dim) == 1 and dim[0].axis == 0 and dim[0].step == 1


def _with_bias(gemm: DenseGemm, flow: Dataflow) -> DenseGemm:
    """With a bias [E, N] that is added to every token, where the only reader adds one."""
    add = flow.only_user(gemm.end)
    if add is None or add.op != "aten.add":
        return gemm
    if add.kwargs.get("alpha", 1) != 1 or len(add.operands) != 2:
        return gemm
    own = [v for v in add.operands if v.value is gemm.end]
    others = [v for v in add.operands if v.value is not gemm.end]
    if len(own) != 1 or not own[0].is_whole or add.shape != gemm.end.shape:
        return gemm
    bias = add.whole.of_operand(strip_casts(others[0])[0])
    dims = dict(zip(gemm.roles, bias.effect.dims, strict=True))
    repeats = {role: all(a.axis is None for a in dim) for role, dim in dims.items()}
    if not repeats["t"] or bias.value.projected:
        return gemm
    by_expert = bias.with_dims(dims["e"], dims["n"])
    return DenseGemm(gemm.x, gemm.weight, by_expert, add, gemm.roles, (*gemm.absorbed, add))


def roles_through(view: View, roles: Sequence[str]) -> str | None:
    """The roles of a view's dimensions, where it only orders its value's own; None otherwise."""
    if view.effect.start != (0,) * len(roles) or len(view.effect.dims) != len(roles):
        return None
    found = []
    ones = [axis for axis, size in enumerate(view.value.shape) if size == 1]
    for dim in view.effect.dims:
        if dim == () and len(ones) == 1:  # one token
            found.append(roles[ones[0]])
            continue
        axis = dim[0].axis if len(dim) == 1 else None
        if axis is None or dim[0].length != view.value.shape[axis] or dim[0].step != 1:
            return None
        found.append(roles[axis])
    return "".join(found) if len(set(found)) == len(roles) else None
