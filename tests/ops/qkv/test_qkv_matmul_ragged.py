"""Compares Modular MAX's op with its description, which is written out byte by byte and token by
token."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpreter as interpreter
from tests.ops.qkv import plain
from tilewright.ops import ArgumentError, calls, fused_qkv_matmul_kv_cache_paged_ragged
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.ragged_samples import RAGGED_CASES, RaggedCase

OP = get_op("fused_qkv_matmul_kv_cache_paged_ragged")
CASES = {case.name: case for case in RAGGED_CASES}
PLAIN, GPTQ, FP8 = CASES["plain"], CASES["gptq"], CASES["fp8_blocks"]


def gptq_weight(a):
    """Decodes the weight [N, K] in float64 from the bytes of the buffer."""
    raw, n_rows = bytes(a.weight.flatten().tolist()), a.weight.shape[1]
    hidden, group = a.hidden_state.shape[1], a.group_size
    scales_at = n_rows * hidden // 2
    zeros_at = scales_at + 2 * n_rows * hidden // group
    weight = torch.empty(n_rows, hidden, dtype=torch.float64)
    for n in range(n_rows):
        for k in range(hidden):
            (word,) = struct.unpack_from("<I", raw, 4 * (k // 8 * n_rows + n))
            (scale,) = struct.unpack_from("<e", raw, scales_at + 2 * (k // group * n_rows + n))
            zero = 8
            if a.has_zp:
                place = k // group * (n_rows // 8) + n // 8
                (zeros,) = struct.unpack_from("<I", raw, zeros_at + 4 * place)
                zero = zeros >> 4 * (n % 8) & 15
            weight[n, k] = ((word >> 4 * (k % 8) & 15) - zero) * scale
    return weight


def fp8_weight(a):
    weight, scale = a.weight.double(), a.weight_scale.double()
    if scale.numel() == 1 or scale.shape[0] == weight.shape[0]:
        return weight * scale
    n, k = torch.meshgrid(*map(torch.arange, weight.shape), indexing="ij")
    return weight * scale[n // 128, k // 128]


def outcome(a):
    """Computes y = x @ W^T + bias in float64. Returns q and, by blocks, the stored values."""
    if a.group_size:
        weight = gptq_weight(a)
    else:
        weight = a.weight.double() if a.weight_scale is None else fp8_weight(a)
    x = a.hidden_state.double()
    if a.input_scale is not None:
        k = torch.arange(x.shape[1])
        wide = a.input_scale.double().expand(x.shape[0], -1)
        x = x * (wide[:, k // 128] if wide.shape[1] > 1 else wide)
    y = x @ weight.T
    if a.bias is not None:
        y = y + a.bias.double()
    _, parts, _, size, heads, dim = a.blocks.shape
    q_dim = weight.shape[0] - (2 * heads * dim if parts == 2 else dim)
    exact = a.blocks.double()
    touched = torch.zeros(a.blocks.shape, dtype=torch.bool)
    offsets = a.input_row_offsets.tolist()
    for b, cached in enumerate(a.cache_lengths.tolist()):
        for i, token in enumerate(range(offsets[b], offsets[b + 1])):
            page, slot = int(a.lookup_table[b, (cached + i) // size]), (cached + i) % size
            for part, scale in zip(range(parts), (a.k_cache_scale, a.v_cache_scale), strict=False):
                first = q_dim + part * heads * dim
                values = y[token, first : first + heads * dim].view(heads, dim)
                if scale is not None:
                    values = values / scale.double().view(-1, 1)
                exact[page, part, a.layer_idx, slot] = values
                touched[page, part, a.layer_idx, slot] = True
    return plain.Outcome(y[:, :q_dim], {"blocks": exact}, {"blocks": touched})


@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda case: case.name)
def test_result_and_pages_are_those_of_the_description(case):
    a, changes = plain.guarded(OP.sample_inputs(case), OP)
    expected = outcome(a)
    q = OP.call(a)
    assert not list(plain.mismatches(OP, a, q, expected))
    assert not list(changes(expected.touched))
    assert bool(expected.touched["blocks"].any()) == (sum(case.new_tokens) > 0)


@pytest.mark.parametrize(
    ("name", "launches"), [("plain", 2), ("gptq_zeros", 2), ("fp8_blocks_across_heads", 3)]
)
def test_a_call_is_repeated_where_its_scales_are_views(name, launches, interpreter, monkeypatch):
    """A call can be repeated if its scales are views. If a block has rows of two projections, the
    scales have to be expanded, and they belong to one call."""
    whole = []
    op = replace(OP, validate_values=whole.append)
    run, a = calls.Calls(op, "cuda"), OP.sample_inputs(CASES[name])
    monkeypatch.setattr(interpreter, "launcher", lambda launch: lambda values: None)
    args, kwargs = OP.split(a)
    results = [run(*args, **kwargs) for _ in range(3)]
    assert len(whole) == launches
    assert all(result.shape == OP.fake(a).shape for result in results)


def test_values_beyond_an_8_bit_floats_range_saturate():
    a = OP.sample_inputs(replace(CASES["fp8_cache"], cache_scale=()))
    a = replace(a, k_cache_scale=torch.tensor(1e-4), bias=torch.full((256,), 1.0))
    a.bias[128:160] = torch.nan
    expected = outcome(a)
    OP.call(a)
    written = a.blocks.double()[expected.touched["blocks"]]
    assert (written.abs() == 448).sum() > 100
    # NaN stays NaN: the K of the first head of every token.
    assert written.isnan().sum() == 32 * a.hidden_state.shape[0]


def test_the_projection_is_rounded_once():
    """The projection is rounded once. MAX rounds it before it adds the bias, and again afterwards,
    which is less accurate."""
    a = OP.sample_inputs(RaggedCase("once", bias=True))
    q, exact = OP.call(a), outcome(a).q
    once = exact.to(torch.bfloat16)
    twice = (exact - a.bias[: exact.shape[1]].double()).to(torch.bfloat16)
    twice = twice + a.bias[: exact.shape[1]]
    assert (q == once).float().mean() > 0.99
    assert (q == twice).float().mean() < 0.9
    assert (q.double() - exact).abs().mean() < (twice.double() - exact).abs().mean()


@pytest.mark.parametrize("sizes", [{"num_heads": 1}, {"num_heads": 2}, {"mla": True, "q_dim": 128}])
def test_a_block_of_scales_may_be_all_of_a_projection(sizes):
    case = RaggedCase("blocks", scale="block", num_kv_heads=1, head_dim=128, hidden=192, **sizes)
    a = OP.sample_inputs(case)
    expected = outcome(a)
    assert OP.tolerances[case.dtype].problem(OP.call(a), expected.q) is None
    touched = expected.touched["blocks"]
    written, wanted = a.blocks[touched], expected.caches["blocks"][touched]
    assert OP.tolerances[case.dtype].problem(written, wanted) is None


def test_gptq_scales_are_not_cut_off():
    """GPTQ scales keep their digits. MAX truncates fp16 scales to bf16, so that 1 + 2^-10 would be
    1."""
    a = OP.sample_inputs(replace(GPTQ, dtype=torch.float32))
    halves = a.weight.flatten()[256 * 32 :].view(torch.float16)
    halves.fill_(1 + 2**-10)
    cut = outcome(a).q / (1 + 2**-10)
    assert OP.tolerances[torch.float32].problem(OP.call(a), outcome(a).q) is None
    assert OP.tolerances[torch.float32].problem(OP.call(a), cut) is not None


def test_mla_writes_k_alone():
    a = OP.sample_inputs(CASES["mla"])
    before = a.blocks.clone()
    assert OP.call(a).shape == (13, 64)
    changed = (a.blocks != before).any(dim=-1)
    assert changed.shape == (8, 1, 3, 8, 1)
    assert int(changed.sum()) == 13


def test_mla_writes_the_first_head_of_blocks_with_more():
    """With MLA, the latent is written as the first head, although the blocks have more heads, which
    hold other data."""
    a = OP.sample_inputs(CASES["mla"])
    more = torch.cat((a.blocks, torch.randn_like(a.blocks)), dim=4)
    others = more[..., 1:, :].clone()
    q = OP.call(replace(a, blocks=more))
    assert torch.equal(q, OP.call(a))
    assert torch.equal(more[..., :1, :], a.blocks)
    assert torch.equal(more[..., 1:, :], others)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_all_may_have_any_rank(shape):
    a = OP.sample_inputs(RaggedCase("one", scale="tensor", input_scale="tensor", hidden=160))
    scales = {name: getattr(a, name).view(shape) for name in ("weight_scale", "input_scale")}
    flat = replace(a, blocks=a.blocks.clone(), **scales)
    assert torch.equal(OP.call(flat), OP.call(a))
    assert torch.equal(flat.blocks, a.blocks)


def test_called_by_hand_as_a_serving_engine_would():
    a = OP.sample_inputs(PLAIN)
    args, _ = OP.split(a)
    by_hand = a.blocks.clone()
    args[3], args[6] = by_hand, torch.tensor([1], dtype=torch.uint32)
    q = fused_qkv_matmul_kv_cache_paged_ragged(*args)
    assert torch.equal(q, OP.call(a))
    assert torch.equal(by_hand, a.blocks)
    with pytest.raises(ArgumentError, match="layer_idx: expected one number on the CPU"):
        fused_qkv_matmul_kv_cache_paged_ragged(*args[:6], torch.tensor([1, 2]))


@pytest.mark.parametrize("name", ["plain", "mla", "gptq_zeros", "fp8_blocks_across_heads"])
@pytest.mark.parametrize("sizes", ["tokens", "all"])
def test_traced_with_unknown_sizes(name, sizes):
    a, b = (OP.sample_inputs(CASES[name]) for _ in range(2))
    args, options = OP.split(a)
    if sizes == "tokens":
        torch._dynamo.mark_dynamic(a.hidden_state, 0)

    @torch.compile(backend="aot_eager", dynamic=sizes == "all" or None, fullgraph=True)
    def run(*args):
        return fused_qkv_matmul_kv_cache_paged_ragged(*args, **options)

    assert torch.equal(run(*args), OP.call(b))
    assert torch.equal(plain.bits(a.blocks), plain.bits(b.blocks))


def uint32(*values):
    return torch.tensor(values, dtype=torch.uint32)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def entry(row, column, page):
    def change(a):
        table = a.lookup_table.clone()
        table[row, column] = page
        return {"lookup_table": table}

    return change


def scaled(name, where, value):
    def change(a):
        tensor = getattr(a, name).clone()
        tensor[where] = value
        return {name: tensor}

    return change


def gptq_scale(value):
    def change(a):
        weight = a.weight.clone()
        weight.flatten()[256 * 32 :].view(torch.float16)[5] = value
        return {"weight": weight}

    return change


# new tokens (3, 0, 9, 1), cached (6, 3, 0, 8), pages of 8, 8 pages, 3 columns
BAD_VALUES = [
    (PLAIN, {"input_row_offsets": uint32(1, 3, 3, 12, 13)}, "input_row_offsets", "0 as the first"),
    (
        PLAIN,
        {"input_row_offsets": uint32(0, 3, 2, 12, 13)},
        "input_row_offsets",
        "do not decrease, got 3 and then 2 at 2",
    ),
    (
        PLAIN,
        {"input_row_offsets": uint32(0, 3, 3, 12, 12)},
        "input_row_offsets",
        "number of tokens, 13, as the last, got 12",
    ),
    (
        PLAIN,
        {"input_row_offsets": uint32(0, 3, 3, 12, 14)},
        "input_row_offsets",
        "13, as the last, got 14",
    ),
    (PLAIN, entry(0, 1, 8), "lookup_table", r"got 8 for token 2 \(sequence 0, position 8\)"),
    (PLAIN, entry(2, 0, 4000000000), "lookup_table", "got 4000000000 for token 3"),
    (
        PLAIN,
        lambda a: {"lookup_table": a.lookup_table.int().fill_(-1)},
        "lookup_table",
        "from 0 to 7 where a token goes, got -1 for token 0",
    ),
    (
        PLAIN,
        lambda a: {"lookup_table": a.lookup_table.int()[:1].expand(4, -1).contiguous()},
        "lookup_table",
        "every slot for at most one token, got slot .* for tokens",
    ),
    (
        PLAIN,
        {"cache_lengths": uint32(6, 3, 16, 8)},
        "cache_lengths",
        r"positions below 24 .*got 24 of token 11 \(sequence 2\)",
    ),
    (PLAIN, {"cache_lengths": int32(6, -3, 0, 8)}, "cache_lengths", "got -3 of sequence 1"),
    (PLAIN, lambda a: {"weight": a.blocks.view(-1, 64)[:256]}, "weight", "aliases blocks"),
]

BAD_METADATA = [
    (PLAIN, {"layer_idx": 3}, "layer_idx", "from 0 to 2, got 3"),
    (PLAIN, {"layer_idx": -1}, "layer_idx", "from 0 to 2, got -1"),
    (PLAIN, lambda a: {"hidden_state": a.hidden_state[0]}, "hidden_state", r"\[T, K\]"),
    (PLAIN, lambda a: {"hidden_state": a.hidden_state.int()}, "hidden_state", "dtype"),
    (PLAIN, lambda a: {"hidden_state": a.hidden_state[:, ::2]}, "hidden_state", "last dimension"),
    (PLAIN, {"out_dtype": torch.float32}, "out_dtype", "torch.bfloat16 for torch.bfloat16"),
    (FP8, {"out_dtype": None}, "out_dtype", "torch.bfloat16 or .* got None"),
    (PLAIN, lambda a: {"blocks": a.blocks[:, :, 0]}, "blocks", "layers, page_size"),
    (PLAIN, lambda a: {"blocks": a.blocks.float()}, "blocks", "torch.bfloat16 or torch.float8"),
    (PLAIN, lambda a: {"blocks": torch.cat([a.blocks] * 2, 1)}, "blocks", "2 .K and V. or 1"),
    (PLAIN, lambda a: {"blocks": a.blocks[:, :, :0]}, "blocks", "at least one layer"),
    (PLAIN, lambda a: {"blocks": a.blocks.to("meta")}, "blocks", "a tensor on cpu"),
    (
        PLAIN,
        lambda a: {"input_row_offsets": a.input_row_offsets[1:]},
        "input_row_offsets",
        r"\[B \+ 1\] = \[5\]",
    ),
    (PLAIN, lambda a: {"cache_lengths": a.cache_lengths.short()}, "cache_lengths", "uint32"),
    (PLAIN, lambda a: {"cache_lengths": a.cache_lengths[:3]}, "cache_lengths", r"\[B\] = \[4\]"),
    (PLAIN, lambda a: {"lookup_table": a.lookup_table[0]}, "lookup_table", r"\[B, columns\]"),
    (PLAIN, lambda a: {"lookup_table": a.lookup_table.T.contiguous().T}, "lookup_table", "last"),
    (PLAIN, lambda a: {"weight": a.weight[:, :32]}, "weight", r"\[N, K\] = \[\*, 64\]"),
    (PLAIN, lambda a: {"weight": a.weight[:128]}, "weight", "more than the 128 rows"),
    (PLAIN, lambda a: {"weight": a.weight[:170]}, "weight", "multiple of heads .* q_dim 42"),
    (PLAIN, lambda a: {"weight": a.weight.float()}, "weight", "torch.bfloat16 or torch.float8"),
    (PLAIN, lambda a: {"weight": a.weight.T.repeat(1, 2).T[::2]}, "weight", "contiguous dim"),
    (PLAIN, {"has_zp": True}, "has_zp", "False without group_size"),
    (PLAIN, {"weight_scale": torch.ones(1, 1)}, "weight_scale", "weight is torch.bfloat16"),
    (PLAIN, {"bias": torch.ones(64, dtype=torch.bfloat16)}, "bias", r"\[N\] = \[256\]"),
    (PLAIN, {"bias": torch.ones(256).half()}, "bias", "torch.bfloat16 or torch.float32"),
    (FP8, {"weight_scale": None}, "weight_scale", "per tensor.*per channel.*per 128x128"),
    (FP8, {"weight_scale": torch.ones(3, 3)}, "weight_scale", r"per 128x128\), got shape \[3, 3\]"),
    (FP8, {"weight_scale": torch.ones(256, 2)}, "weight_scale", r"\[384, 1\] \(per channel"),
    (FP8, {"weight_scale": torch.ones(384)}, "weight_scale", r"got shape \[384\]"),
    (FP8, {"weight_scale": torch.ones(1).int()}, "weight_scale", "dtype"),
    (FP8, {"input_scale": None}, "input_scale", "per token"),
    (FP8, {"input_scale": torch.ones(2, 13)}, "input_scale", r"per 1x128\), got shape \[2, 13\]"),
    (CASES["fp8_tensor"], {"input_scale": torch.ones(1, 1)}, "input_scale", "None, since"),
    (GPTQ, {"group_size": 48}, "group_size", "divides K = 64.*got 48"),
    (GPTQ, {"group_size": -1}, "group_size", "divides K = 64"),
    (GPTQ, {"group_size": 16}, "weight", r"groups of 16\) = \[40, \*\], got shape \[36, 256\]"),
    (GPTQ, {"has_zp": True}, "weight", r"words, scales and zeros.* \[37, \*\]"),
    (GPTQ, lambda a: {"weight": a.weight.view(torch.int8)}, "weight", "torch.uint8"),
    (GPTQ, lambda a: {"weight": a.weight.repeat(1, 2)[:, :256]}, "weight", "contiguous buffer"),
    (GPTQ, {"weight_scale": torch.ones(1)}, "weight_scale", "since group_size is given"),
    (CASES["fp8_cache"], {"k_cache_scale": torch.ones(3)}, "k_cache_scale", r"\[Hkv\] = \[2\]"),
    (CASES["fp8_cache"], {"k_cache_scale": torch.ones(2).half()}, "k_cache_scale", "float32"),
    (CASES["mla"], {"v_cache_scale": torch.ones(1)}, "v_cache_scale", "blocks hold no V"),
]


def changed(a, change):
    return replace(a, **(change(a) if callable(change) else change))


def ids(rows):
    return [f"{argument}-{n}" for n, (_, _, argument, _) in enumerate(rows)]


def check_refused(case, change, argument, message):
    good = OP.sample_inputs(case)
    before = good.blocks.clone()
    with pytest.raises(ArgumentError, match=message) as caught:
        OP.call(changed(good, change))
    assert (caught.value.op, caught.value.argument) == (OP.name, argument)
    assert torch.equal(plain.bits(good.blocks), plain.bits(before))
    OP.call(good)  # the control: the same arguments without the change


@pytest.mark.parametrize(
    ("case", "change", "argument", "message"), BAD_METADATA, ids=ids(BAD_METADATA)
)
def test_bad_metadata_is_named_before_anything_is_written(case, change, argument, message):
    check_refused(case, change, argument, message)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize(("case", "change", "argument", "message"), BAD_VALUES, ids=ids(BAD_VALUES))
def test_bad_values_are_named_before_anything_is_written(
    case, change, argument, message, debug, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", debug)
    check_refused(case, change, argument, message)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize(("case", "change", "argument", "message"), BAD_VALUES, ids=ids(BAD_VALUES))
def test_bad_values_on_a_gpu_are_named_when_debugging(case, change, argument, message, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    good = OP.sample_inputs(case, "cuda")
    bad = changed(good, change)
    moved = {name: t.cuda() for name, t in vars(bad).items() if isinstance(t, torch.Tensor)}
    # A copy of the blocks would no longer be the weight's memory.
    bad = replace(bad, **{**moved, "blocks": good.blocks})
    before = good.blocks.clone()
    with pytest.raises(ArgumentError, match=message) as caught:
        OP.call(bad)
    assert (caught.value.op, caught.value.argument) == (OP.name, argument)
    assert torch.equal(plain.bits(good.blocks), plain.bits(before))
    OP.call(good)


def test_a_row_of_zeros_may_have_a_scale_of_zero():
    """A row of zeros may have a scale of zero, as when a padding row is quantised."""
    a = OP.sample_inputs(CASES["fp8_channel"])
    a.hidden_state[4] = 0
    a.input_scale[4] = 0
    assert torch.equal(OP.call(a)[4], torch.zeros(128, dtype=torch.bfloat16))


def test_entries_that_no_token_needs_may_hold_anything():
    a = OP.sample_inputs(PLAIN)
    table = a.lookup_table.int()
    table[1] = -7
    table[2, 2] = 99
    first, second = OP.call(a), OP.call(replace(a, lookup_table=table))
    assert torch.equal(first, second)
