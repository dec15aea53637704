"""Tests that every argument that the attention ops refuse is named, and that nothing has been
written by then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewright.ops import ArgumentError, CacheWindow, fused_qkv_paged, paged_kv_store
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.samples import AttentionCase

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")
FLAT = AttentionCase("flat", rope_style="half", rotary_dim=32, bias=True, qk_norm=True)
PER_SEQUENCE = AttentionCase(
    "per_sequence", num_tokens=6, num_pages=3, slots="per_sequence", layout="static_cache"
)
ONE_BASE = AttentionCase("one_base", layout="vllm_pair")


def window(a, **changes):
    return replace(CacheWindow.from_ints(a.k_window), **changes).to_ints()


def slots(*values):
    return lambda a: {"slot_mapping": torch.tensor(values)}


# (op, case, the change, the argument that the error names, a part of the message)
BOTH = [
    (FLAT, lambda a: {"slot_mapping": a.slot_mapping[:, None]}, "slot_mapping", "one axis"),
    (FLAT, lambda a: {"slot_mapping": a.slot_mapping[:4]}, "slot_mapping", r"\[T\] = \[5\]"),
    (
        FLAT,
        lambda a: {"slot_mapping": a.slot_mapping.short()},
        "slot_mapping",
        "int32 or torch.int64",
    ),
    (FLAT, lambda a: {"slot_mapping": a.slot_mapping.to("meta")}, "slot_mapping", "got meta"),
    (FLAT, slots(1, 2, 3, 4, 48), "slot_mapping", "slots below 48, got 48 at 4"),
    (FLAT, slots(1, 2, 3, 2, -1), "slot_mapping", "slot 2 2 times"),
    (PER_SEQUENCE, slots(1, 8), "slot_mapping", "slots below 8, got 8 at 1"),
    (PER_SEQUENCE, slots(1, 2, 3), "slot_mapping", r"num_pages \* S = 3 \* S = 6"),
    (replace(FLAT, indexing="torch"), slots(1, 1, 1, 1, -49), "slot_mapping", "got -49 at 4"),
    (replace(FLAT, indexing="torch"), slots(1, 1, 1, 48, 1), "slot_mapping", "got 48 at 3"),
    (FLAT, lambda a: {"slots": "paged"}, "slots", "one of 'flat', 'per_sequence', .*, got 'paged'"),
    (FLAT, lambda a: {"indexing": "numpy"}, "indexing", "one of 'paged', 'torch'"),
    (FLAT, lambda a: {"k_window": window(a)[:8]}, "k_window", "9 integers .*, got 8 integers"),
    (FLAT, lambda a: {"k_window": window(a, num_pages=7)}, "k_window", "inside k_cache"),
    (FLAT, lambda a: {"v_window": window(a, offset=1)}, "v_window", "inside v_cache"),
    (FLAT, lambda a: {"k_window": window(a, offset=-1)}, "k_window", "no negative"),
    (FLAT, lambda a: {"k_window": window(a, head_stride=0)}, "k_window", "its own element"),
    (
        FLAT,
        lambda a: {"k_window": window(a, num_kv_heads=1)},
        "k_window",
        "num_kv_heads = 2, got 1",
    ),
    (FLAT, lambda a: {"k_window": window(a, head_dim=16)}, "k_window", "head_dim = 32, got 16"),
    (
        FLAT,
        lambda a: {"v_window": window(a, num_pages=5)},
        "v_window",
        "num_pages = 6, as in k_window",
    ),
    (
        FLAT,
        lambda a: {"v_window": window(a, page_size=4)},
        "v_window",
        "page_size = 8, as in k_window",
    ),
    (FLAT, lambda a: {"v_cache": a.k_cache}, "v_cache", "None where V lives in k_cache too"),
    (FLAT, lambda a: {"v_cache": a.k_cache[:]}, "v_cache", "shares no memory"),
    (FLAT, lambda a: {"v_cache": a.v_cache.float()}, "v_cache", "dtype torch.bfloat16"),
    (FLAT, lambda a: {"k_cache": a.k_cache.half()}, "k_cache", "dtype torch.bfloat16"),
    (FLAT, lambda a: {"k_cache": a.k_cache.to("meta")}, "k_cache", "a tensor on cpu"),
    (ONE_BASE, lambda a: {"v_window": list(a.k_window)}, "v_window", "no element with k_window"),
    (FLAT, lambda a: {"cos": None}, "cos", "rope_style is 'half'"),
    (FLAT, lambda a: {"sin": None}, "sin", "rope_style is 'half'"),
    (FLAT, lambda a: {"sin": a.sin[:1]}, "sin", r"shape of cos = \[5, 32\]"),
    (FLAT, lambda a: {"cos": a.cos[:2], "sin": a.sin[:2]}, "cos", "T % T_rope == 0 for T = 5"),
    (FLAT, lambda a: {"cos": a.cos[:, :20], "sin": a.sin[:, :20]}, "cos", r"T_rope, 32\] or"),
    (FLAT, lambda a: {"cos": a.cos.double()}, "cos", "torch.bfloat16 or torch.float32"),
    (FLAT, lambda a: {"cos": a.cos.T.contiguous().T}, "cos", "last dimension"),
    (FLAT, lambda a: {"sin": a.sin.T.contiguous().T}, "sin", "last dimension"),
    (FLAT, lambda a: {"rotary_dim": 31}, "rotary_dim", "even number from 2 to head_dim = 32"),
    (FLAT, lambda a: {"rotary_dim": 34}, "rotary_dim", "got 34"),
    (FLAT, lambda a: {"rotary_dim": 0}, "rotary_dim", "even number"),
    (FLAT, lambda a: {"rope_style": "none"}, "cos", "None, since rope_style"),
    (FLAT, lambda a: {"rope_style": "neox"}, "rope_style", "'half', 'interleaved', .*got 'neox'"),
    (PER_SEQUENCE, lambda a: {"rotary_dim": 8}, "rotary_dim", "0, since rope_style"),
]

QKV_ONLY = [
    (FLAT, lambda a: {"x": a.x[None]}, "x", r"shape \[T, K\]"),
    (FLAT, lambda a: {"x": a.x.T.contiguous().T}, "x", "contiguous last dimension"),
    (FLAT, lambda a: {"x": a.x.long()}, "x", "dtype torch.bfloat16"),
    (FLAT, lambda a: {"x": a.x[:, :32]}, "q_weight", r"= \[\*, \*, 32\], got shape \[4, 32, 64\]"),
    (FLAT, lambda a: {"k_weight": a.k_weight.flatten(0, 1)}, "k_weight", r"\[Hkv, D, K\]"),
    (FLAT, lambda a: {"k_weight": a.k_weight[:, :16]}, "k_weight", r"\[\*, 32, 64\]"),
    (
        FLAT,
        lambda a: {"k_weight": torch.cat([a.k_weight] * 2)[:3]},
        "k_weight",
        "num_heads = 4, got 3",
    ),
    (FLAT, lambda a: {"v_weight": a.v_weight[:1]}, "v_weight", r"\[2, 32, 64\], got shape \[1,"),
    (FLAT, lambda a: {"v_weight": a.v_weight.float()}, "v_weight", "dtype torch.bfloat16"),
    (
        FLAT,
        lambda a: {"q_weight": a.q_weight.repeat_interleave(2, dim=-1)[..., ::2]},
        "q_weight",
        "stride 1 in one of the last two dimensions",
    ),
    (FLAT, lambda a: {"q_weight": a.q_weight.to("meta")}, "q_weight", "a tensor on cpu"),
    (FLAT, lambda a: {"q_bias": a.q_bias.flatten()}, "q_bias", r"\[4, 32\], got shape \[128\]"),
    (FLAT, lambda a: {"k_bias": a.k_bias.half()}, "k_bias", "torch.bfloat16 or torch.float32"),
    (FLAT, lambda a: {"q_norm_weight": a.q_norm_weight[:16]}, "q_norm_weight", r"\[D\] = \[32\]"),
    (
        FLAT,
        lambda a: {"k_norm_weight": a.k_norm_weight[None]},
        "k_norm_weight",
        r"\[H, D\] = \[2, 32\]",
    ),
    (FLAT, lambda a: {"x": a.k_cache.view(-1)[: 5 * 64].view(5, 64)}, "x", "aliases k_cache"),
    (
        FLAT,
        lambda a: {"k_weight": a.v_cache.as_strided((2, 32, 64), (1024, 32, 1))},
        "k_weight",
        "aliases v_cache",
    ),
]

STORE_ONLY = [
    (FLAT, lambda a: {"k": a.k[0]}, "k", r"\[T, Hkv, D\]"),
    (FLAT, lambda a: {"k": a.k.int()}, "k", "dtype"),
    (FLAT, lambda a: {"v": a.v[:, :1]}, "v", r"\[5, 2, 32\], got shape \[5, 1, 32\]"),
    (FLAT, lambda a: {"v": a.v.float()}, "v", "dtype torch.bfloat16"),
    (FLAT, lambda a: {"v": None}, "v_cache", "None, since no V is written"),
    (FLAT, lambda a: {"k": a.k_cache[:5, 0]}, "k", "aliases k_cache"),
    (FLAT, lambda a: {"v": a.k_cache[:5, 0]}, "v", "aliases k_cache"),
]

BAD = [(op, *row) for row in BOTH for op in (QKV, STORE)]
BAD += [(QKV, *row) for row in QKV_ONLY] + [(STORE, *row) for row in STORE_ONLY]


@pytest.mark.parametrize(
    ("op", "case", "change", "argument", "message"),
    BAD,
    ids=[f"{op.name}-{argument}-{n}" for n, (op, _, _, argument, _) in enumerate(BAD)],
)
def test_a_bad_argument_is_named_before_anything_is_written(op, case, change, argument, message):
    good = op.sample_inputs(case)
    bad = replace(good, **change(good))
    caches = [cache for cache in (good.k_cache, good.v_cache) if cache is not None]
    before = [cache.clone() for cache in caches]
    with pytest.raises(ArgumentError, match=message) as caught:
        op.call(bad)
    assert (caught.value.op, caught.value.argument) == (op.name, argument)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
    op.call(good)  # the control: the same arguments without the change


def test_a_source_beside_the_cache_in_one_storage_is_fine():
    """Aliasing concerns elements, not storages."""
    a = STORE.sample_inputs(FLAT)
    storage = torch.zeros(2, *a.k_cache.shape, dtype=torch.bfloat16)
    beside = replace(a, k_cache=storage[0], k=storage[1, :5, 0])
    beside.k.copy_(a.k)
    apart = replace(a, v_cache=a.v_cache.clone(), k_cache=torch.zeros_like(a.k_cache))
    STORE.call(beside)
    STORE.call(apart)
    assert torch.equal(beside.k_cache, apart.k_cache)


def test_rows_of_x_may_be_further_apart():
    a = QKV.sample_inputs(FLAT)
    wide = torch.cat([a.x, a.x], dim=1)[:, :64]
    assert wide.stride() == (128, 1)
    assert torch.equal(QKV.call(replace(a, x=wide)), QKV.call(a))


def test_gpu_values_are_checked_only_on_request(monkeypatch):
    """Values on a GPU are checked only on request. No tensor here is on a GPU: the test is about
    the switch."""
    from tilewright.ops.contract import debug_values

    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    assert not debug_values()
    for off in ("0", " 0 ", "off", "False\n"):
        monkeypatch.setenv("TILEWRIGHT_DEBUG", off)
        assert not debug_values()
    for on in ("1", " 1 "):
        monkeypatch.setenv("TILEWRIGHT_DEBUG", on)
        assert debug_values()


def test_called_by_hand_with_linear_weights_and_a_plain_cache():
    a = QKV.sample_inputs(replace(FLAT, rope_style="none", rotary_dim=0))
    by_hand = [cache.clone() for cache in (a.k_cache, a.v_cache)]
    q = fused_qkv_paged(
        a.x,
        a.q_weight.flatten(0, 1),
        a.k_weight.flatten(0, 1),
        a.v_weight.flatten(0, 1),
        *by_hand,
        a.slot_mapping,
        head_dim=32,
        q_bias=a.q_bias.flatten(),
        k_bias=a.k_bias.flatten(),
        v_bias=a.v_bias.flatten(),
        q_norm_weight=a.q_norm_weight,
        k_norm_weight=a.k_norm_weight,
    )
    assert torch.equal(q, QKV.call(a))
    assert torch.equal(by_hand[0], a.k_cache)
    assert torch.equal(by_hand[1], a.v_cache)


def test_store_by_hand():
    a = STORE.sample_inputs(replace(FLAT, rope_style="none", rotary_dim=0))
    by_hand = [cache.clone() for cache in (a.k_cache, a.v_cache)]
    paged_kv_store(a.k, a.v, *by_hand, a.slot_mapping)
    STORE.call(a)
    assert torch.equal(by_hand[0], a.k_cache)
    assert torch.equal(by_hand[1], a.v_cache)


def test_a_cache_of_another_layout_needs_its_window_by_hand():
    a = STORE.sample_inputs(ONE_BASE)
    with pytest.raises(ArgumentError, match="k_window: expected a CacheWindow") as caught:
        paged_kv_store(a.k, a.v, a.k_cache, None, a.slot_mapping)
    assert caught.value.argument == "k_window"
    k_window, v_window = CacheWindow.vllm_pair(a.k_cache)
    by_hand = a.k_cache.clone()
    paged_kv_store(a.k, a.v, by_hand, None, a.slot_mapping, k_window=k_window, v_window=v_window)
    STORE.call(a)
    assert torch.equal(by_hand, a.k_cache)
