"""Defines a fused op and its pattern, in one file outside the package.

    gate = linear(x, gate_weight)
    up   = linear(x, up_weight)          ⇒   examples::swiglu(x, gate_weight, up_weight)
    out  = silu(gate) * up

Dimension letters: T tokens, K hidden size, N intermediate size.

    python examples/swiglu_pattern.py                          shows it all
    tilewright inspect examples/swiglu_pattern.py:gated_mlp    the same through the command line
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tilewright.compiler import lower, reports
from tilewright.ops import contract
from tilewright.ops.checks import check_device, check_dtype, check_shape
from tilewright.ops.contract import FusedOp
from tilewright.patterns import effects, language
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Match, Result, Stage, reject

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# --- the op -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwigluArguments:
    """The arguments of `swiglu`: x [T, K], and gate_weight and up_weight [N, K] in x's dtype. The
    result is [T, N]."""

    x: torch.Tensor
    gate_weight: torch.Tensor
    up_weight: torch.Tensor


def validate(a: SwigluArguments) -> None:
    """Checks only the metadata of tensors, because this method also runs while a graph is
    traced."""
    check_dtype("swiglu", "x", a.x, DTYPES)
    check_shape("swiglu", "x", a.x, "[T, K]", (None, None))
    check_shape("swiglu", "gate_weight", a.gate_weight, "[N, K]", (None, a.x.shape[1]))
    check_shape("swiglu", "up_weight", a.up_weight, "[N, K]", a.gate_weight.shape)
    for name in ("gate_weight", "up_weight"):
        check_dtype("swiglu", name, getattr(a, name), (a.x.dtype,))
        check_device("swiglu", name, getattr(a, name), a.x.device)


def fake(a: SwigluArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.gate_weight.shape[0]))


def reference(a: SwigluArguments) -> torch.Tensor:
    """Computes the op in fp32 throughout (float64 for float64), with one rounding at the end."""
    wide = torch.promote_types(a.x.dtype, torch.float32)
    x = a.x.to(wide)
    gate, up = (functional.linear(x, w.to(wide)) for w in (a.gate_weight, a.up_weight))
    return (functional.silu(gate) * up).to(a.x.dtype)


@dataclass(frozen=True)
class SwigluCase:
    """A case for the tests that run for every op."""

    name: str
    num_tokens: int = 5
    dtype: torch.dtype = torch.bfloat16


def sample_inputs(case: SwigluCase, device: Any = "cpu", seed: int = 0) -> SwigluArguments:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((case.num_tokens, 64), (96, 64), (96, 64))
    tensors = (torch.randn(shape, generator=generator) / 8 for shape in shapes)
    return SwigluArguments(*(t.to(device, case.dtype) for t in tensors))


contract.register(
    FusedOp(
        namespace="examples",
        name="swiglu",
        arguments=SwigluArguments,
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(),  # a kernel would be a Lowering in this tuple, and `plan` would name it
        cases=(SwigluCase("bf16"), SwigluCase("fp32", dtype=torch.float32)),
        sample_inputs=sample_inputs,
    )
)

# --- the pattern --------------------------------------------------------------------------------

language.register_code("SWIGLU_BIAS", "gate or up projection has a bias, but the op takes no bias")
language.register_code("SWIGLU_PATH", "the product's operand is not a linear of the activation")


@dataclass(frozen=True)
class Swiglu:
    """Matches silu(gate) * up, where gate and up are linears of one activation."""

    name: str = "swiglu"
    op: str = "examples::swiglu"

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields every product with a silu among its factors. Graphs have few such products, and
        every variant of the MLP has one."""
        return (v for v in flow.values if v.op == "aten.mul" and _silu_and_other(v))

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        """Returns the match at a product. `reject` ends the attempt with a reason."""
        silu, other = _silu_and_other(anchor)
        gate, up = _linear(silu.args[0], "gate"), _linear(other, "up")
        x = _tokens_first(gate.args[0])
        if x != _tokens_first(up.args[0]):
            reject(
                "ACTIVATION",
                Stage.ACTIVATION,
                f"gate projects {gate.args[0].value}, up projects {up.args[0].value}",
                gate,
                up,
            )
        num_tokens, width = x.shape[0], gate.shape[-1]
        facts = {"x": f"{_dtype(x)}[{num_tokens},{x.shape[1]}]", "intermediate": width}
        whole = effects.identity((num_tokens, width))
        return Match(
            anchor=anchor,
            arguments={"x": x, "gate_weight": gate.args[1], "up_weight": up.args[1]},
            # The op returns [T, N], but the product may be [B, S, N].
            results=(Result(anchor, effects.reshape(whole, anchor.shape)),),
            absorbed=(gate, up, silu, anchor),
            stores=(),
            facts=facts,
            scope=gate.scope.rpartition(".")[0],
        )


def _silu_and_other(product: Value) -> tuple[Value, View] | None:
    """Returns the silu and the other operand of a product of two whole tensors."""
    if len(product.operands) != 2:
        return None
    left, right = product.operands
    for silu, other in ((left, right), (right, left)):
        if silu.value.op == "aten.silu" and silu.is_whole:
            return silu.value, other
    return None


def _linear(view: View, who: str) -> Value:
    """Returns the linear whose whole result `view` is."""
    linear = view.value
    if linear.op != "aten.linear" or not view.is_whole:
        reject("SWIGLU_PATH", Stage.ACTIVATION, f"{who} is {linear.op}, expected a linear", linear)
    if linear.args[2] is not None:
        reject(
            "SWIGLU_BIAS",
            Stage.GUARDS,
            f"the {who} projection has a bias",
            linear,
            hint="torch.nn.Linear(..., bias=False)",
        )
    return linear


def _tokens_first(activation: View) -> View:
    """Returns a view [..., K] as [T, K]."""
    *tokens, hidden = activation.shape
    flat = effects.reshape(activation.effect, (effects.product(tokens), hidden))
    return View(activation.value, flat)


def _dtype(view: View) -> str:
    return str(view.value.dtype).removeprefix("torch.")


language.register(Swiglu())

# --- models to try it on ------------------------------------------------------------------------


class GatedMlp(torch.nn.Module):
    """The MLP of Llama and similar models."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def gated_mlp(bias: bool = False, device: str = "meta") -> tuple[Any, tuple[Any, ...], dict]:
    """Returns (model, args, kwargs), as `tilewright inspect` takes them."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(GatedMlp(64, 96, bias) for _ in range(3)))
    model = torch.nn.Sequential(OrderedDict(layers=layers))
    model = model.to(device, torch.bfloat16).requires_grad_(False)
    return model, (torch.randn(2, 5, 64, dtype=torch.bfloat16, device=device),), {}


def gated_mlp_with_bias() -> tuple[Any, tuple[Any, ...], dict]:
    return gated_mlp(bias=True)


def error_against(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Returns the relative error in the 2-norm."""
    return float(torch.dist(actual.double(), exact) / torch.linalg.vector_norm(exact))


def main() -> None:
    model, args, kwargs = gated_mlp()
    lowered = lower(model, args, kwargs, patterns=["swiglu"])
    print(f"matched\n{lowered}\n")
    nodes = (n for n in lowered.graphs[0].after.graph.nodes if n.op.startswith("call"))
    print("rewritten\n" + ", ".join(n.name for n in nodes) + "\n")
    model, args, kwargs = gated_mlp_with_bias()
    print(f"missed\n{lower(model, args, kwargs, patterns=['swiglu'])}\n")

    model, (x,), _ = gated_mlp(device="cpu")
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    with torch.no_grad():
        fused, eager = compiled(x), model(x)
        exact = model.double()(x.double())
    print(f"run with {len(reports()[-1].matches)} fused sites; relative error against float64:")
    print(f"eager {error_against(exact, eager):.1e}, fused {error_against(exact, fused):.1e}")


if __name__ == "__main__":
    main()
