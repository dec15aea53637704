"""Measures one row of `benchmarks/moe.py`: one layer, format and token count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from moe_layers import WEIGHT_BYTES, Experts, MoeShape, arguments, glu
from timing import capture, cpu_us, interleaved_us

from tilewright.codegen.moe.plan import MoePlan
from tilewright.codegen.targets import SM90
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.moe import OP, reference
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Launch, Machine, drive

MAX_SETS = 16
# The number of tokens up to which errors are measured. For more tokens, computing the float64
# reference would take most of the run.
CHECKED_TOKENS = 64
# For each kernel of the two GEMMs, its name in the results.
GEMMS = {
    **dict.fromkeys(("moe_up", "moe_up_codes", "moe_up_scaled"), "up"),
    **dict.fromkeys(("grouped_gemm", "moe_down_codes", "grouped_scaled"), "down"),
}


def chain(shape: MoeShape) -> Callable[..., torch.Tensor]:
    """Returns Hugging Face's `grouped_mm_experts_forward`, without expert parallelism."""

    def experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias):
        num_slots = ids.shape[-1]
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(
            sorted_ids.int(), bins=shape.num_experts, min=0, max=shape.num_experts - 1
        )
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        both = torch._grouped_mm(x[perm // num_slots], gate_up, ends)
        if gate_up_bias is not None:
            both.add_(gate_up_bias[sorted_ids])
        out = torch._grouped_mm(glu(shape, both), down, ends)
        if down_bias is not None:
            out.add_(down_bias[sorted_ids])
        out = out * weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0), device=x.device)
        return out[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)

    # Dynamo limits the compilations of a code object, so each model gets a separate code object.
    code = experts.__code__.replace(co_name=f"experts_{shape.num_experts}_{shape.hidden}")
    return FunctionType(code, globals(), code.co_name, None, experts.__closure__)


def stored(shape: MoeShape, experts: Experts) -> tuple[Any, ...]:
    """Returns gate_up and down [E, K, N] with their biases, as `chain` takes them."""
    assert experts.gate_up is not None
    assert experts.down is not None
    pair = (experts.gate_up, experts.down)
    if not shape.oss:
        pair = (pair[0].mT, pair[1].mT)
    return (*pair, experts.gate_up_bias, experts.down_bias)


def launches(
    a: FusedMoeArguments, plan: MoePlan | None = None, machine: Machine | None = None
) -> dict[str, Launch]:
    """Runs a call of the op, and returns its launches by kernel.

    If a kernel is launched twice, the last launch is returned. `plan` replaces the planner's plan,
    and `machine` replaces the GPU of the tensors.
    """
    machine = machine or machine_of(a.x.device)
    program = drive(fused_moe_steps(a, machine.target, plan), machine, keep=True)
    made = [step for step, _ in program.steps if isinstance(step, Launch)]
    return {GEMMS.get(launch.spec.kernel, launch.spec.kernel): launch for launch in made}


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def measure(
    shape: MoeShape, experts: Experts, form: str, num_tokens: int, kind: str, copy: float,
    bf16: Experts | None, stock: Callable[..., torch.Tensor] | None,
) -> dict[str, Any]:  # fmt: skip
    """Measures one row. `bf16` has the dense experts with which a quantised row is compared."""
    count = min(shape.argument_sets(num_tokens, form), MAX_SETS)
    calls = [arguments(shape, experts, num_tokens, kind) for _ in range(count)]
    steps = [launches(a) for a in calls]
    split = [OP.split(a) for a in calls]
    machine = machine_of(calls[0].x.device)
    variants: dict[str, Callable[[int], Any]] = {
        "tilewright": lambda i: OP.torch_op(*split[i][0], **split[i][1]),
        "up": lambda i: machine.perform(steps[i]["up"]),
        "down": lambda i: machine.perform(steps[i]["down"]),
    }
    if stock is not None:
        weights = stored(shape, experts)
        given = [(a.x, a.expert_ids, a.expert_weights, *weights) for a in calls]
        eager = chain(shape)
        rows = [x[ids.flatten().sort().indices // shape.num_slots] for x, ids, *_ in given]
        ends = [s["up"].values["ends_ptr"][: shape.num_experts] for s in steps]
        hidden = [
            s["down"].values["x_ptr"].view(len(r), -1) for s, r in zip(steps, rows, strict=True)
        ]
        variants |= {
            "eager": lambda i: eager(*given[i]),
            "stock": lambda i: stock(*given[i]),
            "grouped_up": lambda i: torch._grouped_mm(rows[i], weights[0], ends[i]),
            "grouped_down": lambda i: torch._grouped_mm(hidden[i], weights[1], ends[i]),
        }
    if bf16 is not None:
        plain = {"weight_format": "dense", "scale_block": (), **_no_scales(), **bf16.given}
        dense = [replace(a, **plain) for a in calls]
        dense_split = [OP.split(a) for a in dense]
        variants["bf16"] = lambda i: OP.torch_op(*dense_split[i][0], **dense_split[i][1])
    row: dict[str, Any] = {
        "model": shape.name, "format": form, "tokens": num_tokens, "routing": kind,
        "experts": sum(len(a.expert_ids.unique()) for a in calls) / count,
        "most_rows": int(calls[0].expert_ids.flatten().bincount().max()),
    }  # fmt: skip
    if num_tokens <= CHECKED_TOKENS:
        exact = reference(replace(calls[0], x=calls[0].x.double()))
        for name in ("tilewright", "eager"):
            if name in variants:
                row[f"{name}_error"] = error(variants[name](0), exact)
    if num_tokens <= 16:
        row["cpu"] = cpu_us(lambda: variants["tilewright"](0))
    per_graph = max(count, 10 if num_tokens <= 64 else 4 if num_tokens <= 1024 else 2)
    graphs = {
        name: capture([lambda i=i, v=v: v(i % count) for i in range(per_graph)], warmup=1)
        for name, v in variants.items()
    }
    row |= interleaved_us(graphs, per_graph, rounds=5, replays=2 if num_tokens <= 1024 else 1)
    reason = OP.plan_for(calls[0], SM90.name).reason
    return row | rates(shape, form, row, copy) | {"lowering": reason}


def _no_scales() -> dict[str, None]:
    parts = ("gate", "up", "down")
    return {f"{part}_{kind}scale": None for part in parts for kind in ("", "expert_")}


def rates(shape: MoeShape, form: str, row: dict[str, Any], copy: float) -> dict[str, Any]:
    """Returns TFLOP/s and TB/s of the GEMMs alone, and the ratios of the times of PyTorch's
    versions to tilewright's."""
    routes = row["tokens"] * shape.num_slots
    matrix = shape.hidden * shape.inner
    # The bytes of an element of x, and of an element of the first GEMM's result. The second GEMM
    # reads that result.
    size = 1 if form == "fp8fp8" else 2
    bytes_in = {"up": size * shape.hidden * row["tokens"], "down": size * shape.inner * routes}
    bytes_out = {"up": size * shape.inner * routes, "down": 2 * shape.hidden * routes}
    made: dict[str, Any] = {}
    for name, matrices in (("up", 2), ("down", 1)):
        read = row["experts"] * matrices * matrix * WEIGHT_BYTES[form]
        moved = read + bytes_in[name] + bytes_out[name]
        seconds = 1e-6 * row[name]
        made[f"{name}_tflops"] = 2 * routes * matrices * matrix / seconds / 1e12
        made[f"{name}_tb_per_s"] = moved / seconds / 1e12
        made[f"{name}_of_copy"] = moved / seconds / copy
        if f"grouped_{name}" in row:
            made[f"{name}_speedup"] = row[f"grouped_{name}"] / row[name]
    if "stock" in row:
        made["over_best"] = min(row["eager"], row["stock"]) / row["tilewright"]
    if "bf16" in row:
        made["over_bf16"] = row["bf16"] / row["tilewright"]
    return made


def describe(row: dict[str, Any]) -> str:
    peers = "  ".join(f"{p} {row[p]:7.1f}" for p in ("eager", "stock", "bf16") if p in row)
    gemms = "  ".join(
        f"{n} {row[n]:7.1f} ({row[f'{n}_tflops']:.0f} TF {row[f'{n}_of_copy']:.2f}"
        + (f" {row[f'{n}_speedup']:.2f}x)" if f"{n}_speedup" in row else ")")
        for n in ("up", "down")
    )
    ratios = " ".join(f"{row[k]:.2f}x" for k in ("over_best", "over_bf16") if k in row)
    errors = "/".join(f"{row[k]:.4f}" for k in ("tilewright_error", "eager_error") if k in row)
    return (
        f"{row['model'][:12]:12} {row['format']:5} {row['routing']:6} T={row['tokens']:4} "
        f"({row['experts']:5.1f}): ours {row['tilewright']:7.1f}  {peers}  {ratios}  {gemms}  "
        f"err {errors}" + (f" cpu {row['cpu']:.0f}" if "cpu" in row else "")
    )
