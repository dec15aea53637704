"""Tests the products of each head with a weight of codes: kernels, decoded numbers, and errors
against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.agreement import ALLOWANCE, relative_error
from tests.attention_cases import performed
from tests.interpreted import Interpreter, interpret
from tests.ops.mla.test_decode import Sizes, call_of
from tilewright.codegen.formats import AWQ_ORDER
from tilewright.codegen.mla.head_kernels import scaled_step
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import get_op
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.sample_codes import CodedCase
from tilewright.ops.mla.arguments import MlaDecodeArguments, halves
from tilewright.ops.mla.decode.lowering import coded_heads, head_steps
from tilewright.ops.mla.samples import coded_weight
from tilewright.ops.sampling import Sampler

OP = get_op("mla_decode")
SUMS, TILES, DECODES = "head_products", "coded_head_products", "dequantize_weight"
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
        weight |= {"weight_format": "fp8", "scale_block": list(self.block)}
        q = (a.q.float() * self.of_queries).to(self.dtype)
        return replace(a, q=q, latent=latents[0], rope_keys=latents[1], **weight), call.seen


def absorbed(a: MlaDecodeArguments, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Computes the steps of an absorbed graph in a dtype, which decodes the weight first."""
    wide = torch.promote_types(dtype, torch.float32)
    weight = a.kv_b.dequantize(wide).to(dtype)
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
    "scales of rows": Coded(torch.float16, block=(4096, 64), of_queries=30.0),
    "halves of blocks": Coded(sizes=replace(SIZES, nope=64, v_dim=96), of_latents=10.0),
    "bf16 scales": Coded(scale_dtype=torch.bfloat16, block=(64, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_codes_are_multiplied_and_no_less_accurate_than_decoded_weights(name):
    a, seen = CALLS[name].made()
    run = interpret(OP, a)
    assert products_of(run) == [SUMS, SUMS]
    assert_no_worse_than_decoded(run.outcome.result, a, seen)


def products_of(run) -> list[str]:
    """Returns the kernels of a run that read the weight."""
    return [spec.kernel for spec in run.specs if spec.kernel in (SUMS, TILES, DECODES)]


def assert_no_worse_than_decoded(result, a, seen):
    exact = absorbed(a, seen, torch.float64)
    eager = relative_error(absorbed(a, seen, a.q.dtype), exact)
    assert relative_error(result, exact) <= eager + ALLOWANCE[a.q.dtype]
    assert relative_error(OP.reference(a), exact) <= eager


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        (replace(SIZES, nope=24), (128, 128)),
        (SIZES, (1, 128)),
        (SIZES, (128, 8)),
    ],
    ids=["a head begins within a step", "rows", "narrow blocks"],
)
def test_other_float8_codes_are_decoded_tile_by_tile(sizes, block):
    a, seen = Coded(sizes=sizes, block=block).made()
    run = interpret(OP, a)
    assert products_of(run) == [TILES, TILES]
    assert_no_worse_than_decoded(run.outcome.result, a, seen)


# --- codes in all formats -------------------------------------------------------------------------

# N is no multiple of a step over K, and L and V are no multiples of a tile's columns.
ODD = Sizes(heads=2, nope=40, rope=16, v_dim=48, rank=160)
WHOLE = 1 << 20  # more columns than there are
HALF = {"dtype": torch.float16}
FORMATS = {
    "int4": CodedCase(weight_format="int4_k", scale_block=(1, 32), zero_point=8),
    "int4 bytes": CodedCase(weight_format="int4_k", scale_block=(1, 16), words=torch.uint8,
                            zeros="int"),
    "int4 words of bytes": CodedCase(weight_format="int4_k", scale_block=(1, 160),
                                     words=torch.uint8, nibble_order=(1, 0), **HALF),
    "GPTQ": CodedCase(weight_format="int4_k", scale_block=(1, 32), zeros="packed", zero_point=1,
                      **HALF),
    "AWQ": CodedCase(weight_format="int4_n", scale_block=(1, 32), zeros="packed",
                     nibble_order=AWQ_ORDER),
    "added zeros": CodedCase(weight_format="int4_k_offset", scale_block=(1, 80), zeros="float",
                             zero_point=8),
    "int8": CodedCase(weight_format="int8", scale_block=(1, WHOLE)),
    "uint8": CodedCase(weight_format="int8", scale_block=(2, 32), words=torch.uint8, zeros="int",
                       zero_point=100, **HALF),
    "int8, odd blocks": CodedCase(weight_format="int8", scale_block=(3, 36)),
    "fp8 of a factor": CodedCase(weight_format="fp8", scale_block=(1, 32), factor=True),
    "nvfp4": CodedCase(weight_format="nvfp4", scale_block=(1, 16), factor=True, words=torch.uint8),
    "mxfp4": CodedCase(weight_format="mxfp4", scale_block=(1, 32), words=torch.uint8, **HALF),
    "nf4": CodedCase(weight_format="nf4", scale_block=(1, 32), words=torch.uint8,
                     nibble_order=(1, 0), scale_dtype=torch.float32),
}  # fmt: skip


def with_codes(case: CodedCase, sizes: Sizes) -> tuple[MlaDecodeArguments, torch.Tensor]:
    """Returns a call with a weight of codes, and what each query sees."""
    call = call_of(sizes, "positions")
    a, sampler = call.arguments, Sampler("cpu", 3)
    weight = coded_weight(case, sampler, *a.kv_b_weight.shape)
    if case.zero_point == 1:  # GPTQ stores a weight by columns
        weight["kv_b_weight"] = weight["kv_b_weight"].T.contiguous().T
    moved = {name: getattr(a, name).to(case.dtype) for name in ("q", "latent", "rope_keys")}
    return replace(a, **moved, **weight), call.seen


@pytest.mark.parametrize("name", FORMATS)
def test_each_number_of_a_weight_is_decoded_and_rounded_once(name):
    """Rows of the identity as x give the weight itself. The numbers that the kernel decodes are the
    numbers of the op's reference, to the last bit."""
    a, _ = with_codes(FORMATS[name], ODD)
    dtype, rank = a.q.dtype, ODD.rank
    wanted = halves(a, a.kv_b.dequantize(torch.float32).to(dtype))
    # The rows are at both ends of K.
    picked = torch.cat((torch.arange(32), torch.arange(rank - 32, rank)))
    rows = [torch.eye(ODD.nope), torch.eye(rank)[picked]]
    columns = [wanted[0], wanted[1].mT[:, picked]]
    for one, x, weight in zip(coded_heads(a), rows, columns, strict=True):
        x = x.to(dtype)[:, None].expand(-1, ODD.heads, -1)
        machine = Interpreter()
        made = performed(head_steps(x, one, machine.target), machine)
        assert machine.kernels == [TILES]
        assert torch.equal(made, weight.transpose(0, 1))


@pytest.mark.parametrize("name", ["int4", "AWQ", "uint8", "nvfp4"])
def test_decode_steps_decode_codes_tile_by_tile(name):
    a, seen = with_codes(FORMATS[name], replace(ODD, heads=16))
    run = interpret(OP, a)
    assert products_of(run) == [TILES, TILES]
    assert_no_worse_than_decoded(run.outcome.result, a, seen)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("int4", replace(ODD, batch=65)),
        ("fp8 of a factor", replace(ODD, batch=65)),
        ("AWQ", replace(ODD, nope=36, v_dim=52)),
    ],
    ids=["many tokens", "float8, many tokens", "a word has rows of both weights"],
)
def test_other_calls_decode_the_whole_weight_first(name, sizes):
    a, seen = with_codes(FORMATS[name], sizes)
    run = interpret(OP, a)
    assert products_of(run)[0] == DECODES
    assert_no_worse_than_decoded(run.outcome.result, a, seen)


REFUSED = {
    "no scales": ({"kv_b_scale": None}, "kv_b_scale", "since weights are int4_k"),
    "a format that does not exist": ({"weight_format": "int3"}, "weight_format", "int4_k"),
    "numbers with scales": ({"weight_format": "dense"}, "scale_block", "weights are dense"),
    "another dtype": ({"weight_format": "fp8", "zero_point": 0}, "kv_b_weight", "float8_e4m3fn"),
    "groups that do not divide L": ({"scale_block": [1, 48]}, "scale_block", "divides K = 160"),
    "other rows": ({"v_dim": 88}, "kv_b_weight", r"H \* \(N \+ V\) rows"),
    "codes of one half": ({"v_weight": torch.zeros(2, 48, 160)}, "weight_format", "dense, since"),
}


@pytest.mark.parametrize(("changes", "argument", "message"), REFUSED.values(), ids=REFUSED)
def test_codes_that_do_not_fit_are_refused_by_name(changes, argument, message):
    a, _ = with_codes(FORMATS["int4"], ODD)
    with pytest.raises(ArgumentError, match=message) as caught:
        OP.call(replace(a, **changes))
    assert caught.value.argument == argument


def test_a_step_has_one_scale():
    assert scaled_step(128, 256) == 64
    assert scaled_step(128, 448) == 64
    assert scaled_step(96, 160) == 32
    assert scaled_step(128, 176) == 16
    assert scaled_step(128, 152) is None
    assert scaled_step(1) is None
