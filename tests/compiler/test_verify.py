"""Tests `verify`: a right rewrite passes, and a wrong one is replaced by the original."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from tests.compiler.running import (
    assert_close,
    build,
    compiled,
    copies,
    patterns_used,
    same_bits,
)
from tilewright.compiler import reports
from tilewright.compiler.verify import VerificationError, without_nan
from tilewright.ops import contract

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def wrong(monkeypatch, change, name="fused_qkv_paged"):
    """Makes the op's reference wrong: it calls `change(arguments, result)` at its end. Every
    lowering uses the reference."""
    op = contract.get_op(name)
    right = op.reference

    def reference(arguments):
        return change(arguments, right(arguments))

    def reference_of(self):
        return reference if self.name == name else self.__dict__["reference"]

    monkeypatch.setattr(
        type(op),
        "choose",
        lambda self, device, a, target: contract.Choice(self.reference_lowering(), ()),
    )
    monkeypatch.setattr(type(op), "reference", property(reference_of), raising=False)


def wrong_q(arguments, q):
    return q + 1


def wrong_slot(arguments, q):
    """Changes V of one of the ten tokens, in a cache with room for many more."""
    slot = int(arguments.slot_mapping[-1])
    arguments.v_cache.view(-1, *arguments.v_cache.shape[2:])[slot] += 1
    return q


def test_a_right_rewrite_passes_verification(caplog):
    model, args = build("setitem_on_view", norm="rms_spelled")
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_close(model, args, verify=True)
    assert caplog.records == []
    assert patterns_used() == ["qkv_cache"]
    (note,) = reports()[-1].notes
    said = r"verified: \d+ outputs and inputs agree .* relative error \S+, allowed 1e-04$"
    assert re.match(said, note)


def test_verification_forgives_garbage_in_a_fresh_cache(caplog):
    model, args = build("setitem_on_view")
    for cache in args[5:]:
        cache[-1] = float("nan")
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model, verify=True)(*args)
    assert caplog.records == []


def attend(q, k, v, mask):
    """Computes attention in which two heads of q [B, 4, S, D] share one head of k and v. A key that
    the mask hides contributes zero times its value."""
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    logits = (q @ k.mT * 0.25).masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v


def attention_of_garbage():
    """Computes attention of three sequences. In the second, keys that no query sees have the values
    NaN, inf and -inf."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 2, 16), torch.randn(3, 2, 24, 16), torch.randn(3, 2, 24, 16)
    mask = (torch.arange(24) < 9).expand(3, 1, 2, 24).contiguous()
    for slot, garbage in ((12, "nan"), (15, "inf"), (20, "-inf")):
        v[1, :, slot] = float(garbage)
    return q, k, v, mask


def test_what_is_nan_in_the_original_is_judged_on_inputs_without_nan(caplog):
    args = attention_of_garbage()
    assert attend(*args)[1].isnan().all()
    with caplog.at_level(logging.WARNING, "tilewright"), torch.no_grad():
        out = compiled(attend, verify=True)(*args)
    assert out.isfinite().all()
    assert caplog.records == []
    assert patterns_used("cache_attention") == ["cache_attention"]
    (note,) = reports()[-1].notes
    assert (
        "output 0, on inputs without NaN, at 128 of 128 elements that are NaN in the orig" in note
    )
    assert note in str(reports()[-1])


def test_a_wrong_rewrite_does_not_hide_behind_nan(monkeypatch, caplog):
    """A wrong rewrite is found although the original has NaN. The rewrite is right only where the
    original is NaN."""
    args = attention_of_garbage()

    def change(arguments, out):
        return torch.cat((out[:2], out[2:4] * 1.5, out[4:]))

    wrong(monkeypatch, change, "cache_attention")
    with caplog.at_level(logging.WARNING, "tilewright"), torch.no_grad():
        out = compiled(attend, verify=True)(*args)
    assert out[1].isnan().all()
    assert "on inputs without NaN" in caplog.records[-1].getMessage()
    assert reports()[-1].matches == ()
    with pytest.raises(VerificationError, match="on inputs without NaN"), torch.no_grad():
        compiled(attend, verify=True, strict=True)(*args)


def test_what_is_nan_on_all_inputs_is_judged_nowhere():
    """A result that is NaN on all inputs is not judged: for a query that sees no key, the original
    gives NaN, and the fused op gives zero."""
    args = attention_of_garbage()
    args[3][1, :, 0] = False
    with torch.no_grad():
        compiled(attend, verify=True)(*args)
    (note,) = reports()[-1].notes
    assert "64 of 128 elements that are NaN in the original" in note


def test_masks_keep_their_minus_infinity():
    mask = torch.tensor([0.0, float("-inf"), 1.0])
    assert without_nan(mask) is mask
    garbage = torch.tensor([2.0, float("nan"), float("-inf"), float("inf")]).bfloat16()
    clean = without_nan(garbage.clone())
    assert (clean.isfinite().all(), clean[0], clean.dtype) == (True, 2, torch.bfloat16)
    assert torch.equal(clean, without_nan(garbage))


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
