"""verify: a right rewrite passes, a wrong one gives way to the original."""

from __future__ import annotations

import logging

import pytest

from tests.compiler.running import (
    assert_close,
    build,
    compiled,
    copies,
    patterns_used,
    same_bits,
)
from tilewright.compiler import reports
from tilewright.compiler.verify import VerificationError
from tilewright.ops import contract

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def wrong(monkeypatch, change):
    """The op's reference, with `change(arguments, q)` applied after it. Every lowering uses it."""
    op = contract.get_op("fused_qkv_paged")
    right = op.reference

    def reference(arguments):
        return change(arguments, right(arguments))

    monkeypatch.setattr(
        type(op), "choose", lambda self, device, a: contract.Choice(self.reference_lowering(), ())
    )
    monkeypatch.setattr(type(op), "reference", property(lambda self: reference), raising=False)


def wrong_q(arguments, q):
    return q + 1


def wrong_slot(arguments, q):
    """One of the ten tokens' V is off, in a cache with room for many more."""
    slot = int(arguments.slot_mapping[-1])
    arguments.v_cache.view(-1, *arguments.v_cache.shape[2:])[slot] += 1
    return q


def test_a_right_rewrite_passes_verification(caplog):
    model, args = build("setitem_on_view", norm="rms_spelled")
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_close(model, args, verify=True)
    assert caplog.records == []
    assert patterns_used() == ["qkv_cache"]


def test_verification_forgives_garbage_in_a_fresh_cache(caplog):
    model, args = build("setitem_on_view")
    for cache in args[5:]:
        cache[-1] = float("nan")
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model, verify=True)(*args)
    assert caplog.records == []


@pytest.mark.parametrize("change", [wrong_q, wrong_slot])
def test_a_wrong_rewrite_falls_back_to_the_original_and_is_reported(change, monkeypatch, caplog):
    model, args = build("setitem_on_view", num_pages=600)
    eager, ours = copies(args), copies(args)
    expected = model(*eager)
    wrong(monkeypatch, change)
    with caplog.at_level(logging.WARNING, "tilewright"):
        run = compiled(model, verify=True, patterns=["qkv_cache"])
        assert same_bits((run(*ours), *ours), (expected, *eager))
    assert "the fused graph differs" in caplog.records[-1].getMessage()
    assert reports()[-1].matches == ()
    assert "the fused graph differs" in reports()[-1].notes[0]
    again = copies(args)
    assert same_bits((run(*again), *again), (expected, *eager))


def test_a_wrong_rewrite_raises_under_strict_before_anything_is_written(monkeypatch):
    model, args = build("setitem_on_view")
    wrong(monkeypatch, wrong_q)
    before = copies(args)
    with pytest.raises(VerificationError, match="output 0: relative error"):
        compiled(model, verify=True, strict=True, patterns=["qkv_cache"])(*args)
    assert same_bits(args, before)
