"""Tests bad input of the MLA ops: the error names the argument, and no element is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.test_contract import clone, results_of
from tilewright.ops import ArgumentError, mla_latent_store, mla_prefill_branch_fp8
from tilewright.ops.mla.cases import BranchCase, PrefillCase, StoreCase
from tilewright.ops.mla.latents.latent_store import OP as STORE
from tilewright.ops.mla.prefill.branch import OP as BRANCH
from tilewright.ops.mla.prefill.chunk_plan import OP as PLAN
from tilewright.ops.mla.prefill.prefill import OP as PREFILL


def assert_refused(op, a, argument, words):
    """Checks that the call raises an error that names `argument`, and that caches stay as they
    are."""
    caches = {name: getattr(a, name) for name in op.mutated}
    before = {n: None if c is None else c.clone() for n, c in caches.items()}
    with pytest.raises(ArgumentError, match=words) as caught:
        op.call(a)
    assert caught.value.argument == argument
    for name, cache in caches.items():
        assert cache is None or torch.equal(cache, before[name])


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


BRANCH_CHANGES = {
    "buffer shorter than the keys": (
        {"buffer_length": [29], "buffer_row_offsets": ([0, 9, 12, 21, 29], "like")},
        "buffer_length", "rows for all 9 keys of sequence 3, got 8 rows",
    ),
    "offsets that disagree with the length": (
        {"buffer_length": [31]}, "buffer_row_offsets", "buffer_length, 31, as the last, got 30",
    ),
    "offsets that decrease": (
        {"buffer_row_offsets": ([0, 9, 3, 21, 30], "like")}, "buffer_row_offsets",
        "do not decrease",
    ),
    "a chunk that does not start where its sequence does": (
        {"cache_offsets": ([0, 1, 0, 0, 0], "like")}, "cache_offsets",
        "0 for sequence 1 in chunk 0",
    ),
    "row offsets that do not end at the tokens": (
        {"input_row_offsets": ([0, 3, 3, 12, 14], "like")}, "input_row_offsets",
        "number of tokens, 13",
    ),
    "a page outside the pool": (
        {"lookup_table": (0, 0, 99)}, "lookup_table",
        "pages from 0 to 7 where a (token goes|key is), got 99",
    ),
    "a layer that is not there": ({"layer_idx": 3}, "layer_idx", "from 0 to 2, got 3"),
    "another granularity": ({"granularity": 32}, "granularity", "128 or 64, got 32"),
    "two lengths for one chunk": ({"buffer_length": [30, 1]}, "buffer_length", "one length"),
    "a width of values that does not fit": ({"v_dim": 60}, "kv_b_proj", "rows"),
    "an unknown mask": ({"mask": "triangle"}, "mask", "'causal', 'none', 'sliding_window'"),
    "a window of nothing": ({"mask": "chunked"}, "window", "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument", "words"), BRANCH_CHANGES.values(), ids=BRANCH_CHANGES
)
def test_the_branch_refuses(changes, argument, words):
    a = BRANCH.sample_inputs(BranchCase("plain"))
    made = {}
    for name, change in changes.items():
        value = getattr(a, name)
        if isinstance(change, tuple) and change[-1] == "like":
            made[name] = torch.tensor(change[0]).to(value.dtype)
        elif isinstance(change, tuple):
            made[name] = changed(value, change[:2], change[2])
        else:
            made[name] = change
    assert_refused(BRANCH, replace(a, **made), argument, words)


@pytest.mark.parametrize(
    ("module", "case"), [(BRANCH, BranchCase("plain")), (PREFILL, PrefillCase("paged"))]
)
def test_queries_without_heads_are_named(module, case):
    a = module.sample_inputs(case)
    assert_refused(module, replace(a, q=a.q[:, :0]), "q", r"at least one head, got shape \[13, 0, ")


def test_positions_past_the_table_are_named():
    a = BRANCH.sample_inputs(BranchCase("plain"))
    assert_refused(
        BRANCH, replace(a, freqs_cis=a.freqs_cis[:8]), "freqs_cis", "from 0 to 7.*got 8 of token"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_length_that_is_no_integer_is_named(dtype):
    arguments, options = BRANCH.split(BRANCH.sample_inputs(BranchCase("plain")))
    arguments[13] = torch.tensor(arguments[13], dtype=dtype)
    with pytest.raises(ArgumentError, match="buffer_length: expected integers"):
        mla_prefill_branch_fp8(*arguments, **options)


def test_scales_of_another_granularity_are_named():
    a = BRANCH.sample_inputs(BranchCase("plain", rank=256))
    words = r"per 128 x 128 block = \[2, 2\], got shape \[2, 1\]"
    assert_refused(
        BRANCH, replace(a, kv_b_proj_scale=a.kv_b_proj_scale[:, :1]), "kv_b_proj_scale", words
    )


def test_a_chunk_with_a_gap_is_named():
    a = BRANCH.sample_inputs(BranchCase("chunks", buffer_size=8))
    starts = changed(a.cache_offsets, (1, 0), 7)
    assert_refused(
        BRANCH, replace(a, cache_offsets=starts), "cache_offsets", "8 for sequence 0 in chunk 1"
    )


def test_offsets_of_fewer_chunks_are_named():
    a = BRANCH.sample_inputs(BranchCase("chunks", buffer_size=8))
    assert_refused(
        BRANCH, replace(a, cache_offsets=a.cache_offsets[:1]), "cache_offsets", r"\[C, B \+ 1\]"
    )


PREFILL_CHANGES = {
    "keys without latents": (
        {"latent": None, "k_rope": None, "slots": "none", "keys": "given", "lookup_table": None},
        "latent",
    ),
    "a rope part alone": ({"latent": None, "slots": "none"}, "k_rope"),
    "writing without a cache": (
        {"latent_cache": None, "latent_window": [], "rope_window": [], "keys": "given",
         "lookup_table": None, "key_offsets": None, "num_keys": 0},
        "slots",
    ),
    "keys of an unknown kind": ({"keys": "somewhere"}, "keys"),
    "no table": ({"lookup_table": None, "slots": "none"}, "lookup_table"),
    "a window over both parts": ({"rope_window": "latent_window"}, "rope_window"),
    "scales without codes": ({"scale_block": [128, 128]}, "scale_block"),
    "a number of keys that is not": ({"num_keys": -1}, "num_keys"),
    "a head that is too narrow": ({"v_dim": 60}, "kv_b_weight"),
    "an infinite scale": ({"scale": float("inf")}, "scale"),
    "a rotation of what": ({"rope_on": "v"}, "rope_on"),
    "an 8-bit core of another kind": ({"attention_dtype": torch.float8_e5m2}, "attention_dtype"),
    "a scale of zero": ({"v_scale": 0.0}, "v_scale"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "argument"), PREFILL_CHANGES.values(), ids=PREFILL_CHANGES)
def test_a_prefill_refuses(changes, argument):
    a = PREFILL.sample_inputs(PrefillCase("paged"))
    made = {
        name: getattr(a, value) if value == "latent_window" else value
        for name, value in changes.items()
    }
    assert_refused(PREFILL, replace(a, **made), argument, "expected")


def test_only_a_call_that_writes_needs_its_cache_apart():
    a = PREFILL.sample_inputs(PrefillCase("paged"))
    rows, rank = a.latent.shape
    inside = a.latent_cache.flatten(0, 1)[:rows]
    latent = inside[:, :rank]
    assert_refused(PREFILL, replace(a, latent=latent), "latent", "memory outside of the part of")
    q = inside.as_strided(a.q.shape, (rank, 1, 1))
    read = replace(a, latent=None, k_rope=None, slots="none", q=q)
    assert PREFILL.call(read).isfinite().all()


def test_codes_of_the_up_projection_need_scales():
    samples = (PREFILL.sample_inputs(case) for case in PREFILL.cases)
    a = next(a for a in samples if a.kv_b_scale is not None)
    assert_refused(PREFILL, replace(a, kv_b_scale=None), "kv_b_scale", "kv_b_weight has codes")


def test_values_that_do_not_fit_are_named():
    a = PREFILL.sample_inputs(PrefillCase("paged"))
    offsets = changed(a.key_offsets, 1, 40)
    assert_refused(PREFILL, replace(a, key_offsets=offsets), "key_offsets", "do not decrease")
    assert_refused(
        PREFILL, replace(a, num_keys=31), "key_offsets", "number of keys, 31, as the last"
    )
    more = changed(a.cache_lengths, 0, int(a.cache_lengths[0]) + 1)
    assert_refused(
        PREFILL, replace(a, cache_lengths=more), "key_offsets", "keys of sequence 0, got"
    )
    a = PREFILL.sample_inputs(PrefillCase("slots", keys="slots", slots="flat", pool="pair"))
    slots = changed(a.key_slots, 2, 64)
    assert_refused(PREFILL, replace(a, key_slots=slots), "key_slots", "from 0 to 63, got 64 at 2")
    twice = changed(a.slot_mapping, 1, int(a.slot_mapping[0]))
    assert_refused(PREFILL, replace(a, slot_mapping=twice), "slot_mapping", "at most once")


def test_a_mask_of_another_shape_and_one_for_ragged_batches_are_refused():
    names = {case.name: case for case in PREFILL.cases}
    a = PREFILL.sample_inputs(names["static_bool_mask"])
    narrow = replace(a, attn_mask=a.attn_mask[..., :-1])
    assert_refused(PREFILL, narrow, "attn_mask", r"shape \[2 or 1, 3 or 1, 5 or 1, 8\]")
    b = PREFILL.sample_inputs(names["paged"])
    assert_refused(
        PREFILL, replace(b, attn_mask=a.attn_mask), "attn_mask", "since row_offsets is given"
    )


def test_a_list_of_blocks_that_is_not_the_masks_is_refused():
    names = {case.name: case for case in PREFILL.cases}
    a = PREFILL.sample_inputs(names["static_bool_mask"])
    listed = torch.ops.tilewright.mask_blocks(a.attn_mask)
    assert torch.equal(PREFILL.call(replace(a, mask_blocks=listed)), PREFILL.call(a))
    for blocks, message in (
        (listed[..., :-1], r"= \[2, 1, 1, 2\], got shape \[2, 1, 1, 1\]"),
        (listed.long(), "dtype torch.int32, got torch.int64"),
        (listed + 2, "expected mask_blocks\\(attn_mask\\), got another list"),
    ):
        assert_refused(PREFILL, replace(a, mask_blocks=blocks), "mask_blocks", message)
    alone = replace(a, attn_mask=None, mask_blocks=listed)
    assert_refused(PREFILL, alone, "mask_blocks", "None, since attn_mask is None")


STORE_CHANGES = {
    "rows that differ": ({"k_rope": lambda t: t[1:]}, "k_rope"),
    "another dtype": ({"latent": lambda t: t.float(), "k_rope": lambda t: t.float(),
                       "norm_weight": lambda t: t.float()}, "latent_cache"),
    "latents that are not contiguous": ({"latent": lambda t: t.T.contiguous().T}, "latent"),
    "a norm of another width": ({"norm_weight": lambda t: t[1:]}, "norm_weight"),
    "an odd rotation": ({"rope_style": lambda t: "spiral"}, "rope_style"),
    "an alias of the cache": ({"latent": lambda t: None}, "latent"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "argument"), STORE_CHANGES.values(), ids=STORE_CHANGES)
def test_a_store_refuses(changes, argument):
    a = STORE.sample_inputs(StoreCase("joint"))
    made = {name: change(getattr(a, name)) for name, change in changes.items()}
    if made.get("latent", a) is None:
        made["latent"] = a.latent_cache.flatten(0, 1)[: a.latent.shape[0], : a.latent.shape[1]]
    assert_refused(STORE, replace(a, **made), argument, "expected")


def test_a_cache_of_another_rank_needs_windows():
    latent, rope = torch.zeros(2, 8), torch.zeros(2, 4)
    with pytest.raises(ArgumentError, match=r"windows, or a cache \[num_pages, page_size, width\]"):
        mla_latent_store(latent, rope, torch.zeros(2, 1, 3, 12), None, torch.tensor([0, 1]))


def test_a_plan_refuses_what_does_not_fit():
    a = PLAN.sample_inputs(PLAN.cases[0])
    for changes, argument in (
        ({"buffer_size": 0}, "buffer_size"),
        ({"page_size": 3}, "buffer_size"),
        ({"max_chunks": 0}, "max_chunks"),
        ({"max_chunks": 1}, "buffer_size"),
        ({"cache_lengths": a.cache_lengths[:1]}, "input_row_offsets"),
    ):
        with pytest.raises(ArgumentError) as caught:
            PLAN.call(replace(a, **changes))
        assert caught.value.argument == argument


def test_good_arguments_are_taken():
    """The control for all tests above: good arguments are accepted."""
    for op in (STORE, PREFILL, BRANCH, PLAN):
        a = clone(op.sample_inputs(op.cases[0]))
        made = results_of(op.call(a))
        for tensor in (*made, *(getattr(a, name) for name in op.mutated)):
            assert tensor is None or tensor.isfinite().all(), op.name
