"""Tests the tiny Hugging Face models: they are deterministic, and a call writes their caches."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is an optional dependency")

from tests.models.hf import MODELS, PREFILL_TOKENS, build_hf

WRITE = {"prefill": slice(0, PREFILL_TOKENS), "decode": slice(PREFILL_TOKENS, PREFILL_TOKENS + 1)}


def logits(case):
    with torch.no_grad():
        return case.model(*case.args, **case.kwargs).logits


@pytest.mark.parametrize(("name", "phase"), list(itertools.product(MODELS, WRITE)))
def test_a_static_step_writes_its_own_positions_only(name, phase):
    case = build_hf(name, phase=phase)
    assert len(case.caches) == 2
    before = [(keys.clone(), values.clone()) for keys, values in case.caches]
    logits(case)
    for now, old in zip(case.caches, before, strict=True):
        for tensor, old_tensor in zip(now, old, strict=True):
            written = (tensor != old_tensor).any(-1).any(1)  # [batch, positions]
            assert written[:, WRITE[phase]].all()
            assert written.sum() == written[:, WRITE[phase]].numel()


@pytest.mark.parametrize("name", MODELS)
def test_static_and_dynamic_caches_and_two_builds_agree(name):
    first, second = build_hf(name, dtype=torch.float32), build_hf(name, dtype=torch.float32)
    dynamic = build_hf(name, cache="dynamic", dtype=torch.float32)
    expected = logits(first)
    assert torch.equal(expected, logits(second))
    torch.testing.assert_close(logits(dynamic), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits(build_hf(name, dtype=torch.float32, seed=1)), expected)
