"""The work of a graph's parts: the FLOPs of a node, a chip's rate for them, and the experts in
use."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from tilewright.codegen.kernel import role_of
from tilewright.codegen.targets import Target
from tilewright.compiler import _compat
from tilewright.compiler.report import Site

#: Triton's names for torch's dtypes. They are the keys of `Target.flops`.
RATES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}

_PRODUCTS = re.compile(
    r"linear|matmul|\bmm|scaled_mm|int_mm|addmm|bmm|einsum|grouped_mm|attention|__matmul__"
)


def is_product(node: fx.Node) -> bool:
    """Whether a node calls for matrix products, which a library computes."""
    return bool(_PRODUCTS.search(_name_of(node)))


def is_grouped(node: fx.Node) -> bool:
    """Whether a node multiplies groups of rows by a matrix each, in PyTorch's operator or in the
    one that transformers registers."""
    return "grouped_mm" in _name_of(node)


def _name_of(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def flops_of(node: fx.Node) -> int:
    """Returns the FLOPs of a node's products. The node runs by itself on fake tensors. Returns 0
    for symbolic sizes."""
    tensors = _compat.tensors_of(*node.all_input_nodes)
    if not is_product(node) or any(map(_compat.is_symbolic, tensors)):
        return 0
    if is_grouped(node):
        rows, weight = tensors[:2]
        return 2 * math.prod(rows.shape) * weight.shape[-1]
    with FlopCounterMode(display=False) as counter:
        _compat.run_fake(node)
    return counter.get_total_flops()


def flop_rate(tensors: Sequence[torch.Tensor], target: Target) -> float:
    """Returns the target's FLOP/s for the first of the tensors whose dtype has a rate. If none has
    one, returns the target's lowest rate."""
    rates = dict(target.flops)
    dtypes = [t.dtype for t in tensors if t.dtype in RATES]
    return rates.get(RATES[dtypes[0]], min(rates.values())) if dtypes else min(rates.values())


def share_of_experts(site: Site) -> float:
    """Returns the share of the stacked expert weights [experts, ...] that a site reads. Returns 1
    for a site without experts.

    The function assumes that tokens are spread evenly over all experts of the router, including the
    experts on other devices. A kernel that computes dot products for each token reads an expert
    once for each token that chooses it.
    """
    facts = site.shapes
    tokens = re.search(r"\[(\d+),", str(facts.get("x", "")))
    if tokens is None or not {"experts", "slots"} <= facts.keys():
        return 1.0
    share = int(facts["slots"]) / int(facts.get("routed", facts["experts"]))
    if any(role_of(kernel.spec) == "reads experts by token" for kernel in site.kernels):
        return min(int(tokens[1]) * share, 1.0)
    return reached(int(tokens[1]), share)


def reached(draws: int, share: float) -> float:
    """Returns the share of experts that at least one of `draws` tokens reaches, if each token
    reaches `share` of them."""
    return 1.0 - (1.0 - min(share, 1.0)) ** draws
