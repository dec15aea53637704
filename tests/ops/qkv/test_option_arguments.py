"""Tests bad addresses, scales, formats and norms. The error names the bad argument, and the op has
written nothing before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.qkv import plain
from tilewright.ops import ArgumentError
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.samples import AttentionCase

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")
CASES = {case.name: case for case in QKV.cases}
PLAIN, TABLE, RAGGED = CASES["plain"], CASES["block_table"], CASES["ragged_uint32"]
WRAPPED = CASES["block_table_of_a_model"]
FP8_CACHE, GPTQ, AWQ = CASES["fp8_cache_multiplied"], CASES["gptq"], CASES["awq"]
INT8, CODES, BLOCKS = CASES["int8"], CASES["fp8_codes_token"], CASES["fp8_blocks"]
NORMED = AttentionCase("normed", qk_norm=True)
PRENORMED = AttentionCase("prenormed", input_norm="rms")


def put(name, where, value):
    def change(a):
        tensor = getattr(a, name).clone()
        tensor[where] = value
        return {name: tensor}

    return change


def entry(name, value):
    """Returns the entry of the block table that token 0 needs."""

    def change(a):
        sequence = 0 if a.sequence_ids is None else int(a.sequence_ids.clamp(min=0)[0])
        table = a.lookup_table.to(torch.int64)
        table[sequence, :] = value
        return {name: table}

    return change


def same_page(a):
    table = a.lookup_table.clone()
    table[:] = table[0, 0]
    return {"lookup_table": table}


# block_table: new tokens (3, 0, 4), cached (6, 2, 0), 6 pages of 8, 3 columns, token 0 is skipped
# its model's form: 4 sequences of one token, 3 columns; ragged: new (1, 2), cached (7, 15)
VALUES = [
    (TABLE, put("sequence_ids", 2, 3), "sequence_ids", "sequences below 3, got 3 of token 2"),
    (WRAPPED, put("sequence_ids", 1, -5), "sequence_ids", "from -4 to 3, got -5 of token 1"),
    (TABLE, put("positions", 5, 24), "positions", r"below 24 .*24 of token 5 \(sequence 2\)"),
    (TABLE, put("positions", 2, 24), "positions", r"below 24 .*24 of token 2 \(sequence 0\)"),
    (WRAPPED, put("positions", 3, -25), "positions", "from -24 to 23.*got -25 of token 3"),
    (WRAPPED, entry("lookup_table", 6), "lookup_table", "from -6 to 5 .* got 6 for token 0"),
    (WRAPPED, entry("lookup_table", -7), "lookup_table", "got -7 for token 0"),
    (RAGGED, entry("lookup_table", 6), "lookup_table", "from 0 to 5 .* got 6 for token 0"),
    (RAGGED, entry("lookup_table", -1), "lookup_table", r"-1 for token 0 \(sequence 0, position 7"),
    (TABLE, same_page, "lookup_table", "every slot for at most one token, got slot"),
    (RAGGED, put("row_offsets", 0, 1), "row_offsets", "0 as the first offset, got 1"),
    (RAGGED, put("row_offsets", 1, 4), "row_offsets", "got 4 and then 3 at 2"),
    (RAGGED, put("row_offsets", 2, 2), "row_offsets", "tokens, 3, as the last, got 2"),
    (RAGGED, put("cache_lengths", 1, 32), "cache_lengths", "got 32 of token 1"),
]


def just(**values):
    return lambda a: values


def of(name, change):
    return lambda a: {name: change(getattr(a, name))}


METADATA = [
    (PLAIN, just(slot_mapping=None), "slot_mapping", "a tensor, since slots is 'flat', got None"),
    (PLAIN, just(lookup_table=torch.ones(1, 1).int()), "lookup_table", "None, since slots"),
    (PLAIN, just(row_offsets=torch.ones(1).int()), "row_offsets", "None, since slots is 'flat'"),
    (TABLE, just(positions=None), "positions", "a tensor, since slots is 'block_table'"),
    (TABLE, just(slot_mapping=torch.arange(7)), "slot_mapping", "None, since"),
    (CASES["ragged"], just(slots="block_table"), "sequence_ids", "a tensor"),
    (RAGGED, just(indexing="torch"), "indexing", "'paged', since slots is 'ragged', got torch"),
    (RAGGED, of("cache_lengths", torch.Tensor.short), "cache_lengths", "or torch.uint32"),
    (TABLE, of("positions", torch.Tensor.short), "positions", "torch.int64, got torch.int16"),
    (TABLE, of("lookup_table", lambda t: t[0]), "lookup_table", r"\[B, columns\]"),
    (TABLE, of("lookup_table", lambda t: t[:, :0]), "lookup_table", "pages for 7 tokens"),
    (TABLE, of("lookup_table", lambda t: t.T.contiguous().T), "lookup_table", "last dimension"),
    (TABLE, of("sequence_ids", lambda t: t[1:]), "sequence_ids", r"\[T\] = \[7\]"),
    (TABLE, of("positions", lambda t: t.to("meta")), "positions", "a tensor on cpu"),
    (RAGGED, of("row_offsets", lambda t: t[1:]), "row_offsets", r"\[B \+ 1\] = \[3\]"),
    (RAGGED, of("cache_lengths", lambda t: t[1:]), "cache_lengths", r"\[B\] = \[2\]"),
    (FP8_CACHE, of("k_cache_scale", lambda t: t.half()), "k_cache_scale", "dtype torch.float32"),
    (FP8_CACHE, of("v_cache_scale", lambda t: torch.ones(3)), "v_cache_scale", r"\[Hkv\] = \[2\]"),
    (FP8_CACHE, of("v_cache_scale", lambda t: t[None]), "v_cache_scale", r"shape \[\], \[1\]"),
    (FP8_CACHE, of("v_cache_scale", lambda t: t.to("meta")), "v_cache_scale", "on cpu"),
    (FP8_CACHE, of("v_cache", lambda t: t.to(torch.float8_e4m3fn)), "v_cache", "float8_e5m2"),
    (
        CASES["double"],
        of("k_cache", lambda t: t.to(torch.float8_e5m2)),
        "k_cache",
        "dtype torch.float64, got torch.float8_e5m2",
    ),
]


def heads(shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype)


QKV_METADATA = [
    (PLAIN, just(kv_repeat=0), "kv_repeat", "a finite number from 1, got 0"),
    (PLAIN, just(kv_repeat=2), "k_window", "num_kv_heads = 4, got 2"),
    (PLAIN, just(gate_run=-1), "gate_run", "a finite number from 0, got -1"),
    (
        PLAIN,
        just(gate_run=4),
        "gate_run",
        "a number whose double divides the 4 heads of q, got 4",
    ),
    (CASES["row_norm"], just(gate_run=1), "norm_width", "'head', because q has gates, got 'row'"),
    (CASES["gates"], just(v_norm=True), "v_norm", "False, because q has gates, got True"),
    (PLAIN, just(q_norm_bias=heads(32)), "q_norm_bias", "None, since q_norm_weight is"),
    (NORMED, just(k_norm_bias=heads(31)), "k_norm_bias", r"\[32\]"),
    (PLAIN, just(clip=-1.0), "clip", "a finite number from 0.0, got -1.0"),
    (PLAIN, just(clip=float("nan")), "clip", "a finite number"),
    (PRENORMED, just(input_rms_norm=False), "input_norm_weight", "None, since input_rms_norm is F"),
    (PRENORMED, just(input_norm_weight=heads(63)), "input_norm_weight", r"\[K\] = \[64\], got"),
    (PRENORMED, just(input_norm_weight=heads(64).half()), "input_norm_weight", "dtype"),
    (PRENORMED, of("input_norm_weight", lambda t: t.to("meta")), "input_norm_weight", "on cpu"),
    (PRENORMED, just(input_norm_eps=-1.0), "input_norm_eps", "a finite number from 0"),
    (PRENORMED, just(input_norm_offset=float("nan")), "input_norm_offset", "a finite number"),
    (PRENORMED, just(input_layer_norm=True), "input_layer_norm", "False, since input_rms_norm is"),
    (PRENORMED, just(input_norm_bias=heads(64)), "input_norm_bias", "None, since input_layer_norm"),
    (CODES, just(input_rms_norm=True), "input_rms_norm", "False, since x has codes"),
    (NORMED, just(norm_kind="batch"), "norm_kind", "one of 'rms', 'layer', got 'batch'"),
    (NORMED, just(norm_width="token"), "norm_width", "one of 'head', 'row'"),
    (NORMED, just(norm_width="row"), "q_norm_weight", r"\[H, D\] = \[4, 32\], got shape \[32\]"),
    (NORMED, just(norm_eps=-1e-6), "norm_eps", "a finite number from 0"),
    (NORMED, just(norm_offset=float("inf")), "norm_offset", "a finite number"),
    (NORMED, just(q_norm_weight=heads((2, 32))), "q_norm_weight", r"\[4, 32\], got shape \[2, 32"),
    (NORMED, just(k_norm_weight=heads(32).half()), "k_norm_weight", "dtype"),
    (NORMED, of("q_norm_weight", lambda t: t.to("meta")), "q_norm_weight", "on cpu"),
    (CASES["grouped"], of("q_weight", lambda t: t[:1]), "q_weight", r"= \[2, \*, 32, 64\]"),
    (CASES["grouped"], of("q_bias", lambda t: t.flatten(0, 1)), "q_bias", r"\[Hkv, G, D\]"),
    (CASES["delta"], of("delta", lambda t: t[:, 1:]), "delta", r"\[5, 384\]"),
    (CASES["delta"], of("delta", lambda t: t.half()), "delta", "torch.bfloat16"),
    (PLAIN, of("q_weight", lambda t: t.flatten(0, 1)), "q_weight", r"\[Hkv, G, D, K\], got shape"),
    (CASES["k_only"], just(v_bias=heads((2, 32))), "v_bias", "None, since v_weight is None"),
    (CASES["k_only"], just(v_cache=heads(8)), "v_cache", "None, since no V is written"),
    (CASES["k_only"], just(v_cache_scale=torch.ones(1)), "v_cache_scale", "None, since no V"),
    (PLAIN, just(weight_format="int2"), "weight_format", "one of 'dense', 'int8'"),
    (PLAIN, just(q_scale=torch.ones(1, 1)), "q_scale", "None, since weights are dense"),
    (PLAIN, just(scale_block=[1, 64]), "scale_block", "nothing, since weights are dense"),
    (PLAIN, just(zero_point=8), "zero_point", "nothing, since weights are dense"),
    (PLAIN, just(weight_format="int8", scale_block=[1, 64]), "q_weight", "dtype torch.int8"),
    (PLAIN, just(x_scale=torch.ones(1, 1)), "x_scale", "None, since x is torch.bfloat16"),
    (PLAIN, just(out_dtype=torch.float16), "out_dtype", "None or torch.bfloat16"),
    (INT8, just(scale_block=[64]), "scale_block", r"\[rows, columns\] that share a scale"),
    (INT8, just(scale_block=[0, 64]), "scale_block", r"\[rows, columns\] that share a scale"),
    (INT8, just(scale_block=[2, 64]), "q_scale", r"= \[64, 1\], got shape \[128, 1\]"),
    (INT8, just(nibble_order=[0, 1]), "nibble_order", "nothing, because no nibbles"),
    (INT8, just(k_scale=None), "k_scale", "a tensor, since weights are int8, got None"),
    (INT8, of("k_scale", lambda t: t.int()), "k_scale", "dtype"),
    (INT8, of("v_scale", lambda t: t.to("meta")), "v_scale", "on cpu"),
    (INT8, of("v_weight", lambda t: t[:, :16]), "v_weight", r"\[2, 32, 64\]"),
    (GPTQ, just(scale_block=[1, 24]), "scale_block", "divides K = 64, got .1, 24."),
    (GPTQ, of("q_scale", lambda t: t[:, :2]), "q_scale", r"= \[128, 4\], got shape \[128, 2\]"),
    (GPTQ, of("q_zero", lambda t: t[:8]), "q_zero", r"= \[128, 4\], got shape \[8, 4\]"),
    (GPTQ, of("q_zero", lambda t: t[:, :2]), "q_zero", r"words = \[16, 4\], got shape \[16, 2\]"),
    (GPTQ, just(nibble_order=[0, 1]), "nibble_order", "order of the 8 nibbles of a word, got"),
    (GPTQ, of("k_weight", lambda t: t[..., :4]), "k_weight", r"which holds \[2, 32, 32\]"),
    (AWQ, of("k_weight", lambda t: t[:, :2]), "k_weight", r"which holds \[2, 16, 64\]"),
    (CASES["int4_k_bytes"], just(nibble_order=[0, 2]), "nibble_order", "of the 2 nibbles"),
    (
        CASES["int4_k_bytes"],
        just(q_zero=torch.zeros(16, 2).int()),
        "nibble_order",
        "of 8 nibbles, because a word holds 8 zeros",
    ),
    (BLOCKS, just(q_zero=torch.zeros(4, 3)), "q_zero", "None for fp8 weights"),
    (BLOCKS, just(zero_point=1), "zero_point", "0 for fp8 weights"),
    (PLAIN, just(factors=torch.ones(3)), "factors", "None, since weights are dense"),
    (INT8, just(factors=torch.ones(2)), "factors", r"= \[3\], got shape \[2\]"),
    (INT8, just(factors=torch.ones(3).double()), "factors", "dtype torch.float32"),
    (INT8, just(factors=torch.ones(())), "factors", "got shape"),
    (INT8, just(factors=torch.ones(6)[::2]), "factors", "contiguous"),
    (CODES, just(out_dtype=None), "out_dtype", "torch.bfloat16 or .*, got None"),
    (CODES, just(out_dtype=torch.float64), "out_dtype", "got torch.float64"),
    (CODES, just(weight_format="int8"), "weight_format", "'fp8', since x has codes"),
    (CODES, just(x_scale=torch.ones(3, 1)), "x_scale", r"shape \[5 or 1, 1 or 1\], got"),
    (CODES, just(x_scale=torch.ones(5)), "x_scale", r"\[T or 1, 1 or K / 128\]"),
    (CODES, just(x_scale=torch.ones(5, 1).int()), "x_scale", "dtype"),
]


def for_both(rows):
    return [(op, *row) for row in rows for op in (QKV, STORE)]


ALL_VALUES = for_both(VALUES)
ALL_METADATA = [*for_both(METADATA), *((QKV, *row) for row in QKV_METADATA)]
COLUMNS = ("op", "case", "change", "argument", "message")


def ids(rows):
    return [f"{op.name}-{argument}-{n}" for n, (op, _, _, argument, _) in enumerate(rows)]


def check_refused(op, case, change, argument, message):
    good = op.sample_inputs(case)
    caches = [cache for cache in (good.k_cache, good.v_cache) if cache is not None]
    before = [cache.clone() for cache in caches]
    with pytest.raises(ArgumentError, match=message) as caught:
        op.call(replace(good, **change(good)))
    assert (caught.value.op, caught.value.argument) == (op.name, argument)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(plain.bits(cache), plain.bits(old))
    op.call(good)  # the control: the same arguments without the change


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize(COLUMNS, ALL_VALUES, ids=ids(ALL_VALUES))
def test_bad_values(op, case, change, argument, message, debug, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", debug)
    check_refused(op, case, change, argument, message)


@pytest.mark.parametrize(COLUMNS, ALL_METADATA, ids=ids(ALL_METADATA))
def test_bad_metadata(op, case, change, argument, message):
    check_refused(op, case, change, argument, message)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize(COLUMNS, ALL_VALUES, ids=ids(ALL_VALUES))
def test_bad_values_on_a_gpu_are_named_when_debugging(
    op, case, change, argument, message, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    good = op.sample_inputs(case, "cuda")
    before = good.k_cache.clone()
    with pytest.raises(ArgumentError, match=message) as caught:
        op.call(replace(good, **change(good)))
    assert (caught.value.op, caught.value.argument) == (op.name, argument)
    assert torch.equal(plain.bits(good.k_cache), plain.bits(before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("case", [TABLE, RAGGED], ids=lambda case: case.name)
def test_a_token_without_a_place_on_a_gpu_is_not_written(case):
    """On a GPU, a token with a bad place is not written. If values are not checked, the op writes
    all other tokens and nothing else."""
    a, changes = plain.guarded(STORE.sample_inputs(case, "cuda"), STORE)
    table = torch.full_like(a.lookup_table.int(), 1 << 20)
    STORE.call(replace(a, lookup_table=table))
    nothing = {name: torch.zeros_like(m) for name, m in plain.outcome(a).touched.items()}
    assert not list(changes(nothing))
