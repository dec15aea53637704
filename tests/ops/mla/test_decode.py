"""Compares `mla_decode` with attention to expanded latents, on Triton's interpreter.

The tests cover which keys a query sees, in all forms of a mask; tiles with many heads and with
several tokens; and split keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.attention_cases import performed
from tests.interpreted import Interpreter, interpret
from tilewright.codegen.attention.kernels import DecodeConfig
from tilewright.codegen.attention.plan import decode_rows
from tilewright.codegen.targets import SM90
from tilewright.ops import mla_decode
from tilewright.ops.attention.arguments import as_attention
from tilewright.ops.attention.checks import MAX_WIDTH
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.attention.operands import RopePart, cache_problem
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import get_op
from tilewright.ops.mla.arguments import MlaDecodeArguments
from tilewright.ops.mla.decode.checks import MAX_ROPE, decode_obstacle
from tilewright.ops.mla.decode.lowering import HeadWeights, head_steps
from tilewright.ops.runtime.program import drive

OP = get_op("mla_decode")
KEYS = 150


@dataclass(frozen=True)
class Sizes:
    """B sequences have S tokens each. A head has N, R and V columns. L is the rank of the
    latents."""

    heads: int = 16
    tokens: int = 1
    nope: int = 32
    rope: int = 16
    v_dim: int = 48
    rank: int = 64
    batch: int = 2
    page: int = 0


@dataclass(frozen=True)
class Call:
    """A call, and the keys [B, 1, S, K] that its queries see. All other keys in the cache are
    NaN."""

    arguments: MlaDecodeArguments
    seen: torch.Tensor
    keys: torch.Tensor


def call_of(sizes: Sizes, mask: str, seed: int = 0) -> Call:
    """Returns a call. `mask` is "positions", "window", "lengths", "bool" or "float"."""
    torch.manual_seed(seed)
    b, s, h = sizes.batch, sizes.tokens, sizes.heads
    last = torch.randint(KEYS // 2, KEYS - 1, (b, 1, 1)) + torch.arange(s)[:, None] - s + 1
    places = torch.arange(KEYS)
    seen = (places <= last)[:, None]
    given: dict[str, Any] = {"num_sequences": b}
    if mask == "window":
        given |= {"mask": "sliding_window", "window": 70}
        seen = seen & (places > last - 70)[:, None]
    if mask in ("positions", "window"):
        given["cache_lengths"] = last[:, 0, 0]
    elif mask == "lengths":
        seen = (places < last[:, :1] + 1)[:, None].expand(b, 1, s, KEYS)
        given |= {"mask": "none", "key_lengths": last[:, 0, 0] + 1}
    else:
        seen = seen & (torch.rand(b, 1, s, KEYS) < 0.7)
        seen[0, :, :, :64] = True  # a whole block
        seen[1, :, :, 64:128] = False
        room = -(-KEYS // sizes.page) * sizes.page if sizes.page else KEYS
        given |= {"mask": "none", "attn_mask": _mask(seen, mask, room - KEYS)}
    keys = torch.randn(b, KEYS, sizes.rank + sizes.rope).bfloat16()
    keys[~seen.any(2)[:, 0]] = torch.nan
    cache = keys
    if sizes.page:
        given["block_table"], cache = _paged(keys, sizes.page)
    weight = torch.randn(h * (sizes.nope + sizes.v_dim), sizes.rank) * sizes.rank**-0.5
    arguments = MlaDecodeArguments(
        torch.randn(b * s, h, sizes.nope + sizes.rope).bfloat16(),
        cache[..., : sizes.rank],
        cache[..., sizes.rank :],
        weight.bfloat16(),
        v_dim=sizes.v_dim,
        scale=(sizes.nope + sizes.rope) ** -0.5,
        **given,
    )
    return Call(arguments, seen, keys)


def _mask(seen, form, more):
    """Returns the mask with `more` additional keys, which are hidden."""
    seen = torch.nn.functional.pad(seen, (0, more))
    if form != "float":
        return seen
    return torch.randn(seen.shape).masked_fill(~seen, float("-inf"))


def _paged(keys, page):
    """Returns (block table, pages). The pages are in random order. Slots without a key hold NaN."""
    batch, columns = keys.shape[0], -(-keys.shape[1] // page)
    table = torch.randperm(batch * columns + 2)[: batch * columns].view(batch, columns)
    pages = keys.new_full((batch * columns + 2, page, keys.shape[2]), torch.nan)
    padded = keys.new_full((batch, columns * page, keys.shape[2]), torch.nan)
    padded[:, : keys.shape[1]] = keys
    pages[table] = padded.view(batch, columns, page, -1)
    return table.int(), pages


def expanded(call: Call, dtype: torch.dtype) -> torch.Tensor:
    """Computes attention as a graph that up-projects every key, with each step in the given dtype.
    Returns [T, H, V]."""
    a = call.arguments
    b, h, nope = call.seen.shape[0], a.q.shape[1], a.kv_b_weight.shape[0] // a.q.shape[1] - a.v_dim
    keys = call.keys.nan_to_num(0.0).to(dtype)
    latent, rope = keys.split((a.latent.shape[2], a.rope_keys.shape[2]), dim=-1)
    kv = (latent @ a.kv_b_weight.to(dtype).T).unflatten(-1, (h, -1)).transpose(1, 2)
    k = torch.cat((kv[..., :nope], rope[:, None].expand(-1, h, -1, -1)), dim=-1)
    q = a.q.to(dtype).unflatten(0, (b, -1)).transpose(1, 2)
    logits = (q @ k.mT).to(torch.promote_types(dtype, torch.float32)) * a.scale
    if a.attn_mask is not None and a.attn_mask.dtype != torch.bool:
        logits = logits + a.attn_mask[..., :KEYS].where(call.seen, 0.0)
    weights = logits.masked_fill(~call.seen, float("-inf")).softmax(-1).to(dtype)
    return (weights @ kv[..., nope:]).transpose(1, 2).flatten(0, 1)


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


WIDTHS = {
    "16 heads": Sizes(),
    "MiniCPM3": Sizes(40, nope=64, rope=32, v_dim=64, rank=256, batch=2),
    "GLM-4.7-Flash": Sizes(20, nope=192, rope=64, v_dim=256, rank=512),
    "DeepSeek-V2-Lite": Sizes(16, nope=128, rope=64, v_dim=128, rank=512),
    "40 heads of rank 512": Sizes(40, nope=16, rope=64, v_dim=16, rank=512),
    "several tokens": Sizes(20, tokens=5),
    "small pages": Sizes(tokens=2, page=16),
    "large pages": Sizes(page=64, heads=5),
}
MASKS = ("positions", "window", "lengths", "bool", "float")


#: All masks at the first widths. The other widths take two of the masks in turn.
MASKED_WIDTHS = [
    (name, mask)
    for number, name in enumerate(WIDTHS)
    for mask in (MASKS if not number else (MASKS[number % 5], MASKS[(number + 2) % 5]))
]


@pytest.mark.parametrize(("name", "mask"), MASKED_WIDTHS)
def test_absorbed_attention_is_no_less_accurate_than_that_of_expanded_latents(name, mask):
    """Absorbed attention must be no less accurate than attention to expanded latents. Both are
    compared with float64. Slots that no query sees hold NaN."""
    call = call_of(WIDTHS[name], mask)
    exact = expanded(call, torch.float64)
    graph = rms_error(expanded(call, torch.bfloat16), exact)
    assert rms_error(OP.reference(call.arguments), exact) < graph
    out = interpret(OP, call.arguments).outcome.result
    assert rms_error(out, exact) < graph


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("16 heads", "bool"),
        ("40 heads of rank 512", "positions"),
        ("several tokens", "positions"),
    ],
)
def test_parts_of_the_keys_merge(name, mask):
    """Merges five parts of the keys. Some parts have no block."""
    a = call_of(WIDTHS[name], mask).arguments
    rank = a.latent.shape[2]
    q = torch.randn(*a.q.shape[:2], rank + a.rope_keys.shape[2]).bfloat16()
    call, rope = as_attention(a, q[..., :rank], a.latent), RopePart(q[..., rank:], a.rope_keys)
    tiles = decode_rows(cache_problem(call, rope), WIDTHS[name].tokens)
    results = []
    for splits in (1, 2, 5):
        machine = Interpreter(SM90)
        steps = attention_steps(call, SM90, DecodeConfig(*tiles, splits, num_stages=1), rope)
        results.append(drive(steps, machine).outcome.result)
    assert machine.kernels[-2:] == ["attention_decode", "attention_merge"]
    # The weights of a part are rounded relative to the largest weight of this part.
    assert all(rms_error(parts, results[0].double()) < 2**-8 for parts in results[1:])


def test_ragged_parts_merge():
    case = next(case for case in OP.cases if case.name == "several_ragged")
    a = OP.sample_inputs(replace(case, key_lengths=(37, 4, 900), room=960))
    program = interpret(OP, a, num_sms=132)
    assert [spec.kernel for spec in program.specs] == [
        *("head_products", "attention_decode", "attention_merge", "head_products"),
    ]
    problem = OP.tolerances[a.q.dtype].problem(program.outcome.result, OP.reference(a).double())
    assert problem is None, problem


def test_no_key_is_copied():
    """No key is copied. Latents and rope keys are columns of one cache, with unused columns after
    each entry."""
    a = call_of(WIDTHS["16 heads"], "positions").arguments
    wide = torch.full((2, KEYS, 100), torch.nan, dtype=torch.bfloat16)
    latent, rope_keys = wide[..., 4:68], wide[..., 70:86]
    latent.copy_(a.latent)
    rope_keys.copy_(a.rope_keys)
    program = interpret(OP, replace(a, latent=latent, rope_keys=rope_keys))
    torch.testing.assert_close(program.outcome.result, interpret(OP, a).outcome.result)
    [attention] = [spec for spec in program.specs if spec.kernel == "attention_decode"]
    assert attention.constant("K_STRIDE") == 100


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("latent", lambda a: {"latent": a.latent[..., 1:]}, "shape [P, S, L]"),
        ("latent", lambda a: {"latent": a.latent[:1], "rope_keys": a.rope_keys[:1]}, "B = 2"),
        ("rope_keys", lambda a: {"rope_keys": a.rope_keys[:, 1:]}, "shape [P, S, R]"),
        ("kv_b_weight", lambda a: {"kv_b_weight": a.kv_b_weight[1:]}, "H * (N + V) rows"),
        ("kv_b_scale", lambda a: {"kv_b_scale": torch.ones(1, 1)}, "weights are dense"),
        ("q", lambda a: {"q": a.q[:, :0]}, "at least one head"),
        ("cache_lengths", lambda a: {"cache_lengths": a.cache_lengths + KEYS}, "lengths from 0"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(name, change, words):
    a = call_of(WIDTHS["16 heads"], "positions").arguments
    with pytest.raises(ArgumentError) as raised:
        OP.torch_op(**vars(replace(a, **change(a))))
    assert raised.value.op.endswith("mla_decode")
    assert raised.value.argument == name
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("v_weight", lambda a: {"v_weight": a.v_weight[:, 1:]}, "shape [H, V, L]"),
        ("v_weight", lambda a: {"v_weight": a.v_weight.float()}, "bfloat16"),
        ("kv_b_weight", lambda a: {"kv_b_weight": a.kv_b_weight[1:]}, "shape [H, N, L]"),
        ("kv_b_weight", lambda a: {"kv_b_weight": a.kv_b_weight.flatten(0, 1)}, "shape [H, N, L]"),
        ("kv_b_weight", lambda a: {"q": a.q[..., :32]}, "0 < N < 32"),
        ("kv_b_scale", lambda a: {"kv_b_scale": torch.ones(1, 1)}, "weights are dense"),
    ],
)  # fmt: skip
def test_weights_apart_that_do_not_fit_are_named(name, change, words):
    a = apart(call_of(WIDTHS["16 heads"], "positions").arguments)
    with pytest.raises(ArgumentError) as raised:
        OP.torch_op(**vars(replace(a, **change(a))))
    assert raised.value.argument == name
    assert words in str(raised.value)


def apart(a):
    """Returns the same call with the halves of the up-projection as separate weights."""
    per_head = a.kv_b_weight.unflatten(0, (a.q.shape[1], -1))
    k_weight, v_weight = per_head.split((per_head.shape[1] - a.v_dim, a.v_dim), dim=1)
    # Engines keep W_UV transposed.
    return replace(a, kv_b_weight=k_weight.clone(), v_weight=v_weight.mT.contiguous().mT)


def test_weights_apart_mean_the_same():
    a = call_of(WIDTHS["16 heads"], "positions").arguments
    assert torch.equal(OP.reference(apart(a)), OP.reference(a))


@pytest.mark.parametrize(
    ("rank", "rope", "fits"),
    [
        (MAX_WIDTH, MAX_ROPE, True),
        (MAX_WIDTH + 8, 64, False),
        (64, MAX_ROPE + 8, False),
    ],
)
def test_wide_latents_and_rope_columns_have_no_kernel(rank, rope, fits):
    a = call_of(WIDTHS["16 heads"], "positions").arguments
    latent = torch.empty(*a.latent.shape[:2], rank, dtype=a.latent.dtype)
    rope_keys = torch.empty(*a.rope_keys.shape[:2], rope, dtype=a.latent.dtype)
    q = torch.empty(*a.q.shape[:2], a.q.shape[2] - a.rope_keys.shape[2] + rope, dtype=a.q.dtype)
    obstacle = decode_obstacle(replace(a, q=q, latent=latent, rope_keys=rope_keys))
    said = f"no kernel for latents of rank {rank} with {rope} rope columns"
    assert obstacle == (None if fits else said)


def test_it_can_be_called_by_hand():
    a = call_of(WIDTHS["16 heads"], "positions").arguments
    given = dict(vars(a))
    four = [given.pop(name) for name in ("q", "latent", "rope_keys", "kv_b_weight")]
    torch.testing.assert_close(mla_decode(*four, **given), OP.reference(a))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("turned", [False, True])
def test_each_head_has_a_weight_of_its_own(tokens, turned):
    """Each head has a weight of its own. The widths fill no tile, and rows and weights are parts of
    larger tensors, which hold NaN elsewhere."""
    heads, k, width = 3, 40, 72
    x = torch.full((tokens, heads, k + 8), torch.nan).bfloat16()[..., :k].normal_()
    shape = (heads, width + 8, k) if turned else (heads, k + 8, width)
    stored = torch.full(shape, torch.nan).bfloat16()
    weights = (stored[:, 8:].mT if turned else stored[:, 8:]).normal_()
    out = performed(head_steps(x, HeadWeights(weights), SM90), Interpreter(SM90))
    want = torch.einsum("thk,hkw->thw", x.double(), weights.double())
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2.0**-8)


def test_many_tokens_take_the_library_s_product_of_each_head():
    x, weights = torch.randn(65, 2, 16).bfloat16(), torch.randn(2, 16, 24).bfloat16()
    machine = Interpreter(SM90)
    out = performed(head_steps(x, HeadWeights(weights), SM90), machine)
    assert machine.kernels == []
    want = torch.einsum("thk,hkw->thw", x.double(), weights.double())
    torch.testing.assert_close(out.double(), want, rtol=2.0**-8, atol=2.0**-7)
