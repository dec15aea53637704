"""Tests the command `verify`: what it compares, finds and needs."""

from __future__ import annotations

import json

import torch

from tests.tools.schemas import schema_checked


def test_verify_compares_every_rewrite_with_float64(command):
    done = command("verify", "real.py:make_real", "--json")
    assert done.exit_code == 0, done.stderr
    (site,) = schema_checked("verify", done.stdout)["sites"]
    assert (site["pattern"], site["scope"], site["count"]) == ("qkv_cache", "layers.*", 2)
    assert 0 < site["plain_error"] < 0.02
    assert 0 < site["fused_error"] <= site["allowed"]
    said = command("verify", "real.py:make_real").stdout
    assert "good" in said
    assert said.rstrip().endswith("verified: 2 sites, none of them is less accurate than allowed")


def test_verify_finds_a_wrong_rewrite(command, monkeypatch):
    monkeypatch.setattr("tilewright.ops.qkv.qkv_cache.write_kv", lambda *a, **k: None)
    done = command("verify", "real.py:make_real", "--json")
    assert done.exit_code == 1
    (site,) = json.loads(done.stdout)["sites"]
    assert not site["good"]
    assert site["fused_error"] > site["allowed"]


def test_a_large_cache_hides_no_wrong_write(command, tmp_path, monkeypatch):
    """A large cache does not hide a wrong write: only the elements that a run changed are compared,
    here three of many slots."""
    (tmp_path / "large.py").write_text(
        "import torch, mine, real\n\ndef make():\n"
        "    model, args, kwargs = real.make_real()\n"
        "    for layer in model.layers:\n"
        "        layer.k_cache = torch.randn(20000, 2, 32, dtype=torch.bfloat16)\n"
        "        layer.v_cache = torch.randn(20000, 2, 32, dtype=torch.bfloat16)\n"
        "    return model, args, kwargs\n"
    )
    assert command("verify", "large.py:make").exit_code == 0
    monkeypatch.setattr("tilewright.ops.qkv.qkv_cache.write_kv", lambda *a, **k: None)
    torch._dynamo.reset()
    assert command("verify", "large.py:make").exit_code == 1


def test_verify_of_meta_tensors_says_that_it_needs_data(command):
    done = command("verify", "mine.py:make")
    assert done.exit_code == 2
    assert "meta device" in done.stderr
    assert "`real` in docs/command-line.md" in done.stderr
