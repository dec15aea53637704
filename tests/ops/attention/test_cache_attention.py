"""Tests `cache_attention`: which calls it refuses, which memory it never reads, and which kernel a
call gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.attention_cases import performed
from tests.interpreted import Interpreter, interpret
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import CacheProblem
from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops import ArgumentError, cache_attention
from tilewright.ops.attention.cache_attention import OP, AttentionArguments
from tilewright.ops.attention.cases import AttentionCase
from tilewright.ops.attention.lowering import attention_steps
from tilewright.ops.attention.operands import cache_problem

B, HEADS, KV_HEADS, WIDTH, ROOM = 2, 8, 2, 16, 80


def call(queries=1, seed=0, **options) -> AttentionArguments:
    """Returns a call with a head-major static cache, in which 70 keys of the first sequence and 5
    of the second are present."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B * queries, HEADS, WIDTH, generator=generator)
    k, v = (torch.randn(B, KV_HEADS, ROOM, WIDTH, generator=generator) for _ in "kv")
    tensors = (x.bfloat16() for x in (q, k.transpose(1, 2), v.transpose(1, 2)))
    given = {"scale": WIDTH**-0.5, "num_sequences": B}
    return AttentionArguments(*tensors, **given | options)


def seen_by(lengths, queries=1) -> torch.Tensor:
    keys = torch.arange(ROOM)
    return torch.stack([(keys < length).expand(queries, ROOM) for length in lengths])[:, None]


WAYS = {
    "mask tensor": {"mask": "none", "attn_mask": seen_by((70, 5))},
    "numbers": {
        "mask": "none",
        "attn_mask": torch.where(seen_by((70, 5)), 0.0, float("-inf")),
    },
    "lengths": {"mask": "none", "key_lengths": torch.tensor([70, 5])},
    "causal": {"cache_lengths": torch.tensor([69, 4])},
    "window": {
        "mask": "sliding_window",
        "window": 70,
        "cache_lengths": torch.tensor([69, 4]),
    },
}


CALLED = AttentionCase("", num_heads=6, num_kv_heads=2, head_dim=32, v_dim=64)
PROBLEM = CacheProblem(2, 3, 32, 64, "bf16", "bf16", tma=True)
PROBLEMS = {
    "plain": (CALLED, PROBLEM),
    "window": (
        replace(CALLED, mask="sliding_window", window=20, softcap=2.0),
        replace(PROBLEM, mask="sliding_window", window=20, capped=True),
    ),
    "codes": (
        replace(CALLED, cache_dtype=torch.float8_e4m3fn),
        replace(PROBLEM, key_dtype="fp8e4nv", tma=False),
    ),
    "mask": (
        replace(CALLED, mask="none", attn_mask="float", positions="none"),
        replace(PROBLEM, mask="none", attn_mask="bf16"),
    ),
    "ragged pages": (
        replace(CALLED, pool="paged", ragged=True),
        replace(PROBLEM, ragged=True, paged=True, page_size=16, sequences=4, tma=False),
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_problem_of_a_call_has_all_that_a_plan_reads(name):
    case, expected = PROBLEMS[name]
    problem = cache_problem(OP.sample_inputs(case))
    assert problem == expected
    assert problem.key_bytes == (32 + 64) * (1 if case.cache_dtype else 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
def test_keys_that_nobody_sees_may_hold_nan(way, target):
    """Tests NaN in keys that no query sees, for the reference and for the kernel, and for every
    form of the mask."""
    a = call(**WAYS[way])
    clean = OP.reference(a)
    hidden = ~seen_by((70, 5))[:, 0, 0]
    for tensor in (a.k, a.v):
        tensor[hidden] = torch.nan
    assert torch.equal(OP.reference(a), clean)
    got = interpret(OP, a, target).outcome.result
    assert OP.tolerances[torch.bfloat16].problem(got, clean.double()) is None


MANY = 30
# For each form: (arguments, the first and the last key that some query of each sequence sees).
WAYS_OF_MANY = {
    "mask tensor": ({"mask": "none", "attn_mask": seen_by((70, 5), MANY)}, ((0, 69), (0, 4))),
    "lengths": ({"mask": "none", "key_lengths": torch.tensor([70, 5])}, ((0, 69), (0, 4))),
    "causal": ({"cache_lengths": torch.tensor([40, 3])}, ((0, 69), (0, 32))),
    "window": (
        {"mask": "sliding_window", "window": 9, "cache_lengths": torch.tensor([40, 3])},
        ((32, 69), (0, 32)),
    ),
}
TILES = [
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 2, tma=True),
    PrefillConfig(64, 32, 4, 2, tma=True, one_loop=True),
]


@pytest.mark.parametrize("way", WAYS_OF_MANY)
@pytest.mark.parametrize("config", TILES, ids=str)
def test_values_that_none_of_many_queries_sees_may_be_nan(way, config):
    """Tests NaN in values that none of many queries sees. The kernel reads values by pointers or by
    descriptors, in separate loops or in one loop."""
    options, extents = WAYS_OF_MANY[way]
    a = call(MANY, **options)
    clean = OP.reference(a)
    for sequence, (first, last) in enumerate(extents):
        for tensor in (a.k, a.v):
            tensor[sequence, :first] = tensor[sequence, last + 1 :] = torch.nan
    got = performed(attention_steps(a, SM90, config), Interpreter(SM90)).result
    assert OP.tolerances[torch.bfloat16].problem(got, clean.double()) is None


@pytest.mark.parametrize("queries", [1, 70])
def test_a_query_that_sees_nothing_gives_zeros_as_sdpa_does(queries):
    mask = seen_by((70, 5), queries).clone()
    mask[1, 0, 0] = False
    a = call(queries, mask="none", attn_mask=mask)
    q = a.q.unflatten(0, (B, queries)).transpose(1, 2)
    k, v = a.k.transpose(1, 2), a.v.transpose(1, 2)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    want = want.transpose(1, 2).flatten(0, 1)
    assert want[queries].abs().max() == 0
    for got in (OP.reference(a), interpret(OP, a).outcome.result):
        assert got[queries].abs().max() == 0
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_row_of_the_lowest_finite_number_averages_all_keys():
    """As in eager, the softmax of equal numbers is an average. Only minus infinity hides a key."""
    lowest = torch.finfo(torch.bfloat16).min
    mask = torch.full((B, 1, 1, ROOM), lowest, dtype=torch.bfloat16)
    a = call(mask="none", attn_mask=mask)
    want = a.v.float().mean(1).repeat_interleave(HEADS // KV_HEADS, 1)
    for got in (OP.reference(a), interpret(OP, a).outcome.result):
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-2)


def long_call(queries, dtype, mask_dtype, lowest, **options) -> AttentionArguments:
    """Returns a call with a static cache of 320 keys. 130 keys of the first sequence and 5 of the
    second are present; all other keys have the mask's lowest number."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B * queries, HEADS, WIDTH, generator=generator)
    k, v = (torch.randn(B, 320, KV_HEADS, WIDTH, generator=generator) for _ in "kv")
    seen = torch.arange(320) < torch.tensor([130, 5])[:, None]
    mask = torch.where(seen, 0, lowest).to(mask_dtype)[:, None, None].repeat(1, 1, queries, 1)
    tensors = (x.to(dtype) for x in (q, k, v))
    given = {"scale": WIDTH**-0.5, "num_sequences": B, "mask": "none", "attn_mask": mask}
    return AttentionArguments(*tensors, **given | options)


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]
CAPS = [{}, {"softcap": 30.0, "scale": 1.0}]
# Many queries have one cap with each pair of dtypes.
LOWEST = [(1, *pair, options) for pair in DTYPES for options in CAPS]
LOWEST += [(70, *pair, CAPS[number % 2]) for number, pair in enumerate(DTYPES)]


@pytest.mark.parametrize(("queries", "dtype", "mask_dtype", "options"), LOWEST, ids=str)
def test_blocks_of_the_lowest_number_are_not_read(queries, dtype, mask_dtype, options):
    """NaN in blocks that have only the lowest number changes no bit, since the row has an ordinary
    number, too. A sink does not change this."""
    lowest = torch.finfo(mask_dtype).min
    a = long_call(queries, dtype, mask_dtype, lowest, **options)
    a = replace(a, sinks=torch.linspace(-1, 1, HEADS))
    want = OP.reference(a)
    clean = interpret(OP, a).outcome.result
    assert OP.tolerances[dtype].problem(clean, want.double()) is None
    for tensor in (a.k, a.v):
        tensor[0, 192:] = tensor[1, 64:] = torch.nan
    assert torch.equal(interpret(OP, a).outcome.result, clean)


@pytest.mark.parametrize(
    ("queries", "dtype"), [(1, torch.bfloat16), (1, torch.float16), (70, torch.bfloat16)], ids=str
)
def test_a_row_of_the_lowest_number_keeps_its_tile_whole(queries, dtype):
    """A padding query has only the lowest number, so all blocks of its tile are read. The query
    sees all keys, with logits that have lost their last digits. The results of other queries in the
    tile do not change."""
    a = long_call(queries, dtype, dtype, torch.finfo(dtype).min)
    a.attn_mask[1, 0, 0] = torch.finfo(dtype).min
    got, want = interpret(OP, a).outcome.result, OP.reference(a)
    torch.testing.assert_close(got[queries], want[queries], rtol=2e-2, atol=1e-2)
    got[queries] = want[queries]
    assert OP.tolerances[dtype].problem(got, want.double()) is None


KEPT = {
    "another mask": {"mask": "causal", "positions": torch.tensor([200])},
    "lengths": {"key_lengths": torch.tensor([320, 4])},
    "a scale without bounds": {"scale": 1.0},
    "a cap of no use": {"softcap": 4e4},
    "keys that the mask alone has": {},
}


@pytest.mark.parametrize("why", KEPT)
def test_the_lowest_number_hides_nothing_where_that_is_not_proven(why):
    a = long_call(1, torch.float16, torch.float16, torch.finfo(torch.float16).min, **KEPT[why])
    if why == "keys that the mask alone has":
        a = replace(a, k=a.k[:, :256], v=a.v[:, :256])
    hiding = torch.ops.tilewright.mask_blocks(a.attn_mask, hide_lowest=True)
    assert hiding[..., 0].flatten().tolist() == [3, 1]
    (made,) = [spec for spec in interpret(OP, a).specs if spec.kernel == "mask_blocks"]
    assert "LOWEST" not in dict(made.constants)
    with pytest.raises(ArgumentError, match="mask_blocks"):
        OP.call(replace(a, mask_blocks=hiding))


def test_how_many_queries_choose_the_kernel():
    def kernel(**sizes):
        return OP.plan_for(call(**sizes, cache_lengths=torch.tensor([0, 0])), "sm100").specs[-1]

    assert kernel(queries=1).kernel == "attention_decode"
    assert kernel(queries=16).kernel == "attention_decode"
    assert kernel(queries=17).kernel == "attention_prefill"


def test_the_library_takes_what_shapes_alone_say():
    def name(**options):
        keys = {n: torch.empty(1, 1024, 2, 64, dtype=torch.bfloat16, device="meta") for n in "kv"}
        q = torch.empty(1024, 8, 64, dtype=torch.bfloat16, device="meta")
        return OP.plan_for(AttentionArguments(q, **keys, scale=0.125, **options), "sm90").name

    assert name() == "library attention"
    assert name(mask="none") == "library attention"
    assert name(softcap=30.0) == "prefill kernel"
    assert name(mask="sliding_window", window=100) == "prefill kernel"


REFUSED = {
    "num_sequences": ({"num_sequences": 3}, "a divisor of T = 2"),
    "k": (
        dict.fromkeys("kv", torch.zeros(B, ROOM, 3, WIDTH, dtype=torch.bfloat16)),
        "divides the 8 of q",
    ),
    "v": ({"v": torch.zeros(B, ROOM - 1, KV_HEADS, WIDTH, dtype=torch.bfloat16)}, "shape"),
    "window": ({"mask": "sliding_window"}, "at least 1"),
    "mask": ({"mask": "diagonal"}, "one of 'causal'"),
    "attn_mask": ({"attn_mask": torch.ones(B, 1, 1, ROOM - 1, dtype=torch.bool)}, "shape"),
    "attn_mask, dtype": ({"attn_mask": torch.ones(B, 1, 1, ROOM, dtype=torch.int32)}, "dtype"),
    "mask_blocks": ({"mask_blocks": torch.zeros(1, 1, 1, 3, dtype=torch.int32)}, "None, since"),
    "sinks": ({"sinks": torch.zeros(HEADS + 1)}, "shape [Hq]"),
    "softcap": ({"softcap": -1.0}, "from 0"),
    "k_scale": ({"k_scale": torch.ones(())}, "None, since the cache has"),
    "key_lengths": ({"key_lengths": torch.tensor([3, ROOM + 1])}, "lengths from 0 to 80"),
    "cache_lengths": ({"cache_lengths": torch.tensor([-1, 3])}, "lengths from 0 to 80"),
    "positions": ({"positions": torch.zeros(3, dtype=torch.int64)}, "shape [T]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_call_means_is_refused_by_name(name):
    options, expected = REFUSED[name]
    a = replace(call(), **options)
    args, kwargs = OP.split(a)
    with pytest.raises(ArgumentError) as error:
        OP.torch_op(*args, **kwargs)
    assert error.value.argument == name.partition(",")[0]
    assert expected in str(error.value)


def test_a_page_outside_the_pool_is_refused_where_a_key_may_be_seen():
    k, v = (torch.randn(6, 16, KV_HEADS, WIDTH).bfloat16() for _ in "kv")
    q = torch.randn(B, HEADS, WIDTH).bfloat16()
    table = torch.tensor([[0, 1, 9], [2, -1, -1]])
    given = {"scale": 1.0, "num_sequences": B, "block_table": table, "mask": "none"}
    fits = cache_attention(q, k, v, key_lengths=torch.tensor([32, 16]), **given)
    assert fits.isfinite().all()
    with pytest.raises(ArgumentError, match=r"block_table.*9 for sequence 0, column 2"):
        cache_attention(q, k, v, key_lengths=torch.tensor([33, 16]), **given)


@pytest.mark.parametrize(("queries", "target"), [(1, "sm100"), (70, "sm90")])
def test_float8_keys_keep_infinity_and_nan(queries, target):
    """The compiler's conversion of float8_e5m2 to bfloat16 multiplies by 2 ** 112, by which
    infinity becomes 65536 and NaN another number. The conversion to float16 keeps both."""
    a = call(queries, cache_lengths=torch.tensor([1, 2]))
    a = replace(a, k=a.k.to(torch.float8_e5m2), v=a.v.to(torch.float8_e5m2))
    ptx = compile_for(OP.plan_for(a, target).specs[0]).ptx
    assert "cvt.rn.f16x2.e5m2x2" in ptx
    assert "e112" not in ptx
