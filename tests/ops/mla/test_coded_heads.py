"""Tests the products of each head with float8 codes: kernels, and errors against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.agreement import ALLOWANCE, relative_error
from tests.interpreted import interpret
from tests.ops.mla.test_decode import Sizes, call_of
from tilewright.codegen.mla.head_kernels import scaled_step
from tilewright.ops.contract import get_op
from tilewright.ops.formats import fp8_block
from tilewright.ops.mla.arguments import MlaDecodeArguments

OP = get_op("mla_decode")
DECODES = "mla_weight_numbers"
SIZES = Sizes(heads=16, nope=128, rope=64, v_dim=128, rank=256)


@dataclass(frozen=True)
class Coded:
    """A call with a float8 weight, and what each query sees [B, 1, S, K].

    of_queries, of_latents: factors of the queries and of the latents, which make logits large.
    """

    dtype: torch.dtype = torch.bfloat16
    sizes: Sizes = SIZES
    block: tuple[int, int] = (128, 128)
    of_queries: float = 1.0
    of_latents: float = 1.0
    scale_dtype: torch.dtype = torch.float32

    def made(self, seed: int = 0) -> tuple[MlaDecodeArguments, torch.Tensor]:
        call = call_of(self.sizes, "positions", seed)
        a = call.arguments
        codes, scale = fp8_block.quantize_blocks(a.kv_b_weight, self.block)
        latents = [(t.float() * self.of_latents).to(self.dtype) for t in (a.latent, a.rope_keys)]
        weight = {"kv_b_weight": codes, "kv_b_scale": scale.to(self.scale_dtype)}
        q = (a.q.float() * self.of_queries).to(self.dtype)
        a = replace(a, q=q, latent=latents[0], rope_keys=latents[1], **weight)
        return replace(a, scale_block=list(self.block)), call.seen


def absorbed(a: MlaDecodeArguments, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Computes the steps of an absorbed graph in a dtype, which decodes the weight first."""
    wide = torch.promote_types(dtype, torch.float32)
    weight = fp8_block.dequantize(a.kv_b_weight, a.kv_b_scale, tuple(a.scale_block), wide).to(dtype)
    k_weight, v_weight = weight.unflatten(0, (a.q.shape[1], -1)).split(
        (weight.shape[0] // a.q.shape[1] - a.v_dim, a.v_dim), dim=1
    )
    q = a.q.to(dtype).unflatten(0, (seen.shape[0], -1))
    q_nope, q_rope = q.split((k_weight.shape[1], a.rope_keys.shape[2]), dim=-1)
    q_latent = torch.einsum("bshn,hnl->bshl", q_nope, k_weight)
    latent, rope = (t.to(dtype).nan_to_num(0.0) for t in (a.latent, a.rope_keys))
    keys = torch.cat((latent, rope), dim=-1)
    logits = torch.einsum("bshd,bkd->bhsk", torch.cat((q_latent, q_rope), -1), keys).to(wide)
    weights = (logits * a.scale).masked_fill(~seen, float("-inf")).softmax(-1).to(dtype)
    out = torch.einsum("bhsk,bkl->bshl", weights, latent)
    return torch.einsum("bshl,hvl->bshv", out, v_weight).flatten(0, 1)


CALLS = {
    "bf16": Coded(),
    "fp16": Coded(torch.float16),
    "large queries": Coded(torch.float16, of_queries=30.0),
    "large latents": Coded(of_latents=10.0),
    "scales of rows": Coded(torch.float16, block=(1 << 20, 64), of_queries=30.0),
    "halves of blocks": Coded(sizes=replace(SIZES, nope=64, v_dim=96), of_latents=10.0),
    "bf16 scales": Coded(scale_dtype=torch.bfloat16, block=(64, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_codes_are_multiplied_and_no_less_accurate_than_decoded_weights(name):
    a, seen = CALLS[name].made()
    run = interpret(OP, a)
    kernels = [spec.kernel for spec in run.specs]
    assert kernels.count("head_products") == 2
    assert DECODES not in kernels
    exact = absorbed(a, seen, torch.float64)
    eager = relative_error(absorbed(a, seen, a.q.dtype), exact)
    assert relative_error(run.outcome.result, exact) <= eager + ALLOWANCE[a.q.dtype]
    assert relative_error(OP.reference(a), exact) <= eager


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        (replace(SIZES, nope=24), (128, 128)),
        (SIZES, (1, 128)),
        (SIZES, (128, 8)),
        (replace(SIZES, batch=65), (128, 128)),
    ],
    ids=["a head begins within a step", "rows", "narrow blocks", "many tokens"],
)
def test_other_codes_are_decoded_first(sizes, block):
    a, seen = Coded(sizes=sizes, block=block).made()
    run = interpret(OP, a)
    assert DECODES in [spec.kernel for spec in run.specs]
    exact = absorbed(a, seen, torch.float64)
    eager = relative_error(absorbed(a, seen, a.q.dtype), exact)
    assert relative_error(run.outcome.result, exact) <= eager + ALLOWANCE[a.q.dtype]


def test_a_step_has_one_scale():
    assert scaled_step(128, 256) == 64
    assert scaled_step(128, 448) == 64
    assert scaled_step(96, 160) == 32
    assert scaled_step(128, 176) == 16
    assert scaled_step(128, 152) is None
    assert scaled_step(1) is None
