"""Replaces cuDNN's attention by PyTorch's, so that calls which use the library run on a CPU."""

from __future__ import annotations

import torch

from tilewright.ops.mla.attention import cudnn


def attention(q, k, v, bias, lse, dropout, causal, *more, scale):
    """Stands for `aten::_scaled_dot_product_cudnn_attention`. It requires rows whose length is a
    multiple of 16 bytes, and returns a result with the layout of q."""
    assert bias is None
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    assert all(step * t.element_size() % 16 == 0 for t in (q, k, v) for step in t.stride()[:-1])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    logsumexp = None
    if lse:
        logits = scale * q.double() @ k.double().mT
        if causal:
            logits.masked_fill_(torch.ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
        logsumexp = logits.logsumexp(-1, keepdim=True).float()
    return out.transpose(1, 2).contiguous().transpose(1, 2), logsumexp


def take_every_call(monkeypatch):
    """Makes the plan use the library for every call that the library can compute."""
    monkeypatch.setattr(cudnn, "library_gains", lambda *sizes: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", attention)
