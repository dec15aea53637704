"""PyTorch's attention in the place of cuDNN's: calls that go to the library run on a CPU."""

from __future__ import annotations

import torch

from tilewright.ops.mla import cudnn as mla_attention_library


def attention(q, k, v, bias, lse, dropout, causal, *more, scale):
    """As `aten::_scaled_dot_product_cudnn_attention`: rows of whole 16 bytes, a result laid out as
    q is."""
    assert bias is None
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert all(step * t.element_size() % 16 == 0 for t in (q, k, v) for step in t.stride()[:-1])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2), None


def take_every_call(monkeypatch):
    """Every call that the library can compute goes to it."""
    monkeypatch.setattr(mla_attention_library, "library_gains", lambda *sizes: True)
    monkeypatch.setattr(mla_attention_library, "_accepted", lambda call: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attention)
