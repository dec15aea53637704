"""Attention of expanded latents: up-projection, K put together, attention.

    kv = linear(latents, kv_b)
    k  = cat(kv[..., :N], rope_keys for every head)            ⇒   mla_prefill
    out = attention(q, k, kv[..., N:])

The query's projection and everything before the latents stay outside, so the same match serves a
graph without a cache, one that reads its latents from a static cache, and one that gathers them
from pages. Dimension letters: see `patterns/mla_keys.py`; T = B * S queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.targets import detect_target
from tilewright.patterns import effects
from tilewright.patterns.attention import (
    Attention,
    is_attention,
    keys_of,
    match_attention,
    without_padding,
)
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.language import Match, Stage, register, reject
from tilewright.patterns.masks import Causal, causal_of
from tilewright.patterns.mla_keys import LatentKeys, has_shared_part, match_latent_keys

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MlaPrefill:
    """The pattern; see the module."""

    name: str = "mla_prefill"
    op: str = "mla_prefill"

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        for value in flow.values:
            if is_attention(value) and _is_latent(value, flow):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        attention = without_padding(match_attention(anchor, flow))
        keys = match_latent_keys(attention, flow)
        _guard(attention, keys)
        absorbed = tuple(dict.fromkeys((*attention.absorbed, *keys.absorbed)))
        return Match(
            pattern=self.name,
            op=self.op,
            anchor=anchor,
            arguments=_arguments(attention, keys),
            results=(attention.result(),),
            absorbed=absorbed,
            stores=(),
            facts=_facts(attention, keys),
            scope=common_scope(keys.weight.value.scope or anchor.scope, anchor.scope),
            scratch=keys.scratch,
        )


def _is_latent(value: Value, flow: Dataflow) -> bool:
    """Whether K has a part that all heads share: worth a word where it is not fused."""
    keys = keys_of(value)
    return keys is not None and has_shared_part(keys, flow)


def _guard(attention: Attention, keys: LatentKeys) -> None:
    read = (attention.q, keys.latents, keys.rope_keys, keys.weight)
    dtypes = {view.value.dtype for view in read}
    if len(dtypes) != 1 or not dtypes <= set(SUPPORTED_DTYPES):
        names, known = (
            ", ".join(sorted(str(d).removeprefix("torch.") for d in some))
            for some in (dtypes, SUPPORTED_DTYPES)
        )
        reject(
            "DTYPE",
            Stage.GUARDS,
            f"query, latents, rope keys and weight have {names}; expected one of {known} for all",
            attention.end,
        )
    device = attention.end.device
    if device.type == "cuda" and detect_target(device.index) is None:
        reject("UNSUPPORTED", Stage.GUARDS, f"{device} has no kernels", attention.end)


def _arguments(attention: Attention, keys: LatentKeys) -> dict[str, Any]:
    batch, queries, heads, head_dim = attention.q.shape
    return {
        "q": _merged(attention.q, effects.product((batch, queries)), heads, head_dim),
        "latent": _rows(keys.latents),
        "k_rope": _rows(keys.rope_keys),
        "kv_b_weight": keys.weight,
        "v_dim": keys.v_dim,
        "scale": attention.scale,
        "num_sequences": batch,
        **_mask(attention),
    }


def _merged(view: View, *shape: Any) -> View:
    return View(view.value, effects.reshape(view.effect, shape))


def _rows(view: View) -> View:
    """[B, K, n] as [B * K, n]."""
    batch, keys, width = view.shape
    return _merged(view, effects.product((batch, keys)), width)


def _mask(attention: Attention) -> dict[str, Any]:
    """The mask, as little of it as has to be read."""
    if attention.mask is None:
        return {"mask": "causal" if attention.causal else "none"}
    if attention.causal:
        reject("ATTENTION_FORM", Stage.GUARDS, "a mask besides is_causal", attention.end)
    found = causal_of(attention.mask, *attention.q.shape[:2])
    if found is True:
        return {"mask": "none"}
    if not isinstance(found, Causal):
        return {"mask": "none", "attn_mask": attention.mask}
    if found.positions is None:
        return {"mask": "causal"}
    return {"mask": "causal", "positions": found.positions}


def _facts(attention: Attention, keys: LatentKeys) -> dict[str, Any]:
    mask = _mask(attention)
    form = "tensor" if "attn_mask" in mask else mask["mask"]
    return {
        "heads": f"{keys.num_heads}x({keys.nope}+{keys.rope_keys.shape[-1]})/{keys.v_dim}",
        "rank": keys.latents.shape[-1],
        "queries": _size(attention.q.shape[1]),
        "keys": _size(keys.latents.shape[1]),
        "mask": form + (" by position" if "positions" in mask else ""),
        "q": str(attention.q.value.dtype).removeprefix("torch."),
    }


def _size(size: Any) -> Any:
    return size if isinstance(size, int) else "T"


register(MlaPrefill())
