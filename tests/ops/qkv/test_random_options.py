"""Compares the ops with plain code in float64 (plain.py), for random settings of every option.

The caches lie inside buffers of random bits. Elements that no token names keep their bits, in the
cache and around it.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.qkv import plain
from tests.ops.qkv.option_space import attention_cases, bounded
from tilewright.ops.contract import get_op

QKV = get_op("fused_qkv_paged")
STORE = get_op("paged_kv_store")
SEEDS = st.integers(0, 2**16)


def normed(a):
    return getattr(a, "input_rms_norm", False)


def check(op, case, seed):
    a, changes = plain.guarded(op.sample_inputs(case, seed=seed), op)
    expected = plain.outcome(a)
    assert not expected.twice
    q = op.call(a)
    # The sum by which x is divided in the norm is rounded, too.
    allowed = op.tolerances
    if normed(a):
        allowed = {dtype: replace(one, of_rms=2 * one.of_rms) for dtype, one in allowed.items()}
    assert not list(plain.mismatches(op, a, q, expected, allowed))
    assert not list(changes(expected.touched))


@bounded(80)
@given(attention_cases(), SEEDS)
def test_fused_qkv_is_plain_code(case, seed):
    check(QKV, case, seed)


@bounded(60)
@given(attention_cases(), SEEDS)
def test_store_is_plain_code(case, seed):
    check(STORE, replace(case, kv_repeat=1), seed)


@bounded(25)
@given(attention_cases(), SEEDS)
def test_fakes_are_like_results(case, seed):
    a = QKV.sample_inputs(case, seed=seed)
    real = QKV.call(a)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = QKV.call(a)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_the_space_reaches_every_option():
    """Checks that hypothesis draws a value other than the default for every keyword of the op."""
    seen = {}

    @bounded(400)
    @given(attention_cases())
    def collect(case):
        for field in fields(case):
            seen.setdefault(field.name, set()).add(getattr(case, field.name))

    collect()
    fixed = {"name"}
    assert {name for name, values in seen.items() if len(values) < 2} == fixed
    assert len(seen["slots"]) == 4
    assert len(seen["weight_format"]) == 9
    assert len(seen["projection"]) == 5
    assert len(seen["rope_style"]) == 4


def test_a_wrong_bit_shows():
    """The control: the check detects an element that is slightly wrong, and a stray write."""
    case = next(case for case in QKV.cases if case.name == "ragged")
    a, changes = plain.guarded(QKV.sample_inputs(case), QKV)
    expected = plain.outcome(a)
    q = QKV.call(a)
    assert list(plain.mismatches(QKV, a, q + 0.02, expected))
    stray = replace(expected, touched={n: m & False for n, m in expected.touched.items()})
    assert list(changes(stray.touched))
