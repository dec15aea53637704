"""Defines a pattern in one file. The pattern has a norm, an in-place write into the graph's own
memory, and arguments that it computes.

    y = x.clone()
    y += sublayer(x)                    ⇒   examples::add_rms_norm(y, s, weight, eps)
    out = rms_norm(y) * weight

Dimension letters: T tokens, K hidden size.

    python examples/post_norm_pattern.py
    tilewright inspect examples/post_norm_pattern.py:post_norm
    tilewright verify examples/post_norm_pattern.py:real
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from add_rms_norm_kernel import add_rms_norm_steps, unsupported
from torch.nn import functional

from tilewright.compiler import lower, reports
from tilewright.ops import contract
from tilewright.ops.checks import check_dtype, check_shape
from tilewright.ops.contract import FusedOp, Lowering
from tilewright.patterns import effects, language
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.language import Match, Result, Stage, reject
from tilewright.patterns.recognise.norm import Norm, match_norm

NAME = "add_rms_norm"

# --- the op -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddRmsNormArguments:
    """The arguments of `add_rms_norm`: y and s [T, K], and weight [K]. The result [T, K] is the RMS
    norm of y + s. The op writes no argument."""

    y: torch.Tensor
    s: torch.Tensor
    weight: torch.Tensor
    eps: float


def validate(a: AddRmsNormArguments) -> None:
    check_shape(NAME, "y", a.y, "[T, K]", (None, None))
    check_shape(NAME, "s", a.s, "[T, K]", a.y.shape)
    check_shape(NAME, "weight", a.weight, "[K]", (a.y.shape[1],))
    for name in ("s", "weight"):
        check_dtype(NAME, name, getattr(a, name), (a.y.dtype,))


def reference(a: AddRmsNormArguments) -> torch.Tensor:
    """Computes in fp32 throughout (float64 for float64), with one rounding at the end."""
    wide = torch.promote_types(a.y.dtype, torch.float32)
    total = a.y.to(wide) + a.s.to(wide)
    return functional.rms_norm(total, total.shape[-1:], a.weight.to(wide), a.eps).to(a.y.dtype)


def sample_inputs(dtype: torch.dtype, device: Any = "cpu", seed: int = 0) -> AddRmsNormArguments:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((5, 64), (5, 64), (64,))
    y, s, weight = (torch.randn(n, generator=generator).to(device, dtype) for n in shapes)
    return AddRmsNormArguments(y, s, weight, 1e-6)


contract.register(
    FusedOp(
        namespace="examples",
        name=NAME,
        arguments=AddRmsNormArguments,
        validate=validate,
        reference=reference,
        lowerings=(
            Lowering("kernel", None, frozenset({"cuda"}), unsupported, build=add_rms_norm_steps),
        ),
        cases=(torch.bfloat16, torch.float32),
        sample_inputs=sample_inputs,
    )
)

# --- the pattern --------------------------------------------------------------------------------

language.register_code("POST_NORM_SUM", "the norm does not read a sum of two activations")


@dataclass(frozen=True)
class AddRmsNorm:
    """Matches the RMS norm of a sum. The sum is computed out of place or in place."""

    name: str = NAME
    op: str = f"examples::{NAME}"

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields the last value of every norm that is not a part of another norm."""
        inside: set[Value] = set()
        for value in reversed(flow.values):
            norm = None if value in inside else _norm(value)
            if norm is not None:
                inside.update(norm.absorbed)
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        norm = match_norm(anchor.whole, Stage.ACTIVATION)
        assert norm is not None
        if norm.kind != "rms":
            reject("UNSUPPORTED", Stage.GUARDS, f"a {norm.kind} norm is not fused", anchor)
        summed = _sum(norm.x)
        y, s = (view.matrix for view in summed.operands)
        return Match(
            anchor=anchor,
            arguments={"y": y, "s": s, "weight": _weight(norm, anchor), "eps": norm.eps},
            results=(Result.of_rows(anchor, y.shape),),
            absorbed=(*norm.absorbed, summed),
            stores=(),
            scratch=tuple(store for store in flow.stores if store.node is summed.node),
            needs_kernel=True,
            facts={"y": f"{list(y.shape)}", "eps": norm.eps},
            scope=anchor.scope,
        )


def _norm(value: Value) -> Norm | None:
    try:
        return match_norm(value.whole, Stage.ACTIVATION)
    except language.Reject:  # a norm with a bias
        return None


def _weight(norm: Norm, anchor: Value) -> View | Computed:
    """Returns `offset + weight` of the norm as a tensor [K], as the op takes it. Returns ones if
    the norm has no weight."""
    if norm.weight is None:
        options = (("dtype", anchor.dtype), ("device", anchor.device))
        return Computed("full", ((norm.width,), 1.0), options)
    row = effects.reshape(norm.weight.effect, (norm.width,))
    weight = View(norm.weight.value, row)
    return Computed("add", (weight, norm.offset)) if norm.offset else weight


def _sum(view: View) -> Value:
    """Returns the sum that is normalised. `y += s` is two values in the graph: the sum, and the
    write of the sum into y."""
    bare, _ = strip_casts(view)
    summed = bare.value
    if summed.op != "aten.add" or len(summed.operands) != 2 or not bare.is_whole:
        reject("POST_NORM_SUM", Stage.ACTIVATION, f"the norm reads {summed}, not a sum", bare)
    return summed


language.register(AddRmsNorm())

# --- a model to try it on -------------------------------------------------------------------------


class PostNorm(torch.nn.Module):
    """A sublayer and the norm after the sublayer. `form` says in which way the norm applies its
    weight."""

    def __init__(self, hidden: int, form: str) -> None:
        super().__init__()
        self.sublayer = torch.nn.Linear(hidden, hidden, bias=False)
        self.weight = torch.nn.Parameter(torch.rand(hidden))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y += self.sublayer(x)
        normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        if self.form == "none":
            return normed
        return normed * (self.weight if self.form == "plain" else 1 + self.weight)


def post_norm(device: str = "meta") -> tuple[Any, tuple[Any, ...], dict]:
    """Returns (model, args, kwargs), as `tilewright inspect` takes them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(PostNorm(64, form) for form in ("plain", "offset", "none")))
    model = model.to(device).requires_grad_(False)
    return model, (torch.randn(2, 5, 64, device=device),), {}


def real() -> tuple[Any, tuple[Any, ...], dict]:
    """Makes the same model with real tensors, because `tilewright verify` runs the model."""
    return post_norm("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    model, args, _ = post_norm()
    print(lower(model, args, patterns=[NAME]))
    model, (x,), _ = post_norm("cpu")
    # By default, tilewright leaves the graph as it is on a CPU, where the op has no kernel.
    options = {"inner": "eager", "everywhere": True}
    compiled = torch.compile(model, backend="tilewright", options=options)
    with torch.no_grad():
        fused, eager, exact = compiled(x), model(x), model.double()(x.double())
    errors = [float(torch.dist(out.double(), exact)) for out in (fused, eager)]
    print(f"{len(reports()[-1].matches)} sites; error {errors[0]:.1e}, eager {errors[1]:.1e}")


if __name__ == "__main__":
    main()
