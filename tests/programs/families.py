"""Random models of several families, each built from parts in tests/models.

`FAMILIES[name](draw)` returns (module, args, a description of the choices) for a `random.Random`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import (
    lora_bent,
    lora_idioms,
    mla_attention,
    mla_idioms,
    mla_weights,
    moe_dense,
    moe_dequant,
    moe_idioms,
    norms,
    qkv_idioms,
)
from tests.models.attention import ROPES
from tests.models.cache_writes import BATCHED, Step
from tests.models.coded import FORMATS, MODELS, build_coded
from tests.models.large import RESTATED, STRUCTURES, Restated
from tests.programs import dense, lora
from tests.programs import dtypes as of_dtypes
from tests.programs import quantised as of_codes
from tests.programs import wild as styles

Drawn = tuple[nn.Module, tuple[Any, ...], str]

DTYPES = (torch.float32,) * 4 + (torch.bfloat16, torch.float16)


def few(draw: random.Random, *counts: int) -> int:
    """Draws one of some counts of tokens, or sometimes zero."""
    return draw.choice((*counts * 3, 0))


def attention(draw: random.Random) -> Drawn:
    """Draws projection, norm, rotation, write and attention. The cache is paged or batched, and may
    have eight bits."""
    form = draw.choice((*qkv_idioms.PAGED, *BATCHED))
    variant = draw.choice(("", *qkv_idioms.VARIANTS))
    changes = {**qkv_idioms.VARIANTS.get(variant, {}), "num_layers": 1, "parallel_mlp": False}
    heads = draw.choice((1, 2))
    sizes = {
        "hidden": draw.choice((32, 48)),
        "num_kv_heads": heads,
        "num_heads": heads * draw.choice((1, 2)),
        "head_dim": draw.choice((16, 32)),
        "num_tokens": few(draw, 8, 10),
        "page_size": draw.choice((4, 8)),
        "norm": draw.choice(("none", "none", *norms.BEFORE[1:], *norms.AFTER)),
        "rope": draw.choice(("none", *ROPES)),
        "table": draw.choice(("computed", "gathered")),
        "bias": draw.random() < 0.3,
        "dtype": draw.choice(DTYPES),
    }
    axes = {**sizes, **changes}
    if "projected_kv_heads" in changes:
        axes |= {"num_heads": 4}
    make = qkv_idioms.paged if form in qkv_idioms.PAGED else qkv_idioms.batched
    module, args = make(form, qkv_idioms.replace(qkv_idioms.Axes(), **axes))
    return module.layers[0]["self_attn"], args, f"{form} {variant} {axes}"


class Stored(nn.Module):
    """Writes keys and values that no projection makes directly into a cache, and reads the
    cache."""

    def __init__(self, form, change: Callable[..., Any], axes: qkv_idioms.Axes) -> None:
        super().__init__()
        self.form, self.change, self.page_size = form, change, axes.page_size
        self.heads = (axes.num_kv_heads, axes.head_dim)
        width = axes.num_kv_heads * axes.head_dim
        self.k_proj = nn.Linear(axes.hidden, width, bias=False)
        self.v_proj = nn.Linear(axes.hidden, width, bias=False)

    def forward(self, x, positions, seq, block_table, slots, *caches):
        step = Step(positions, seq, block_table, slots, self.page_size)
        k, v = (p(x).unflatten(-1, self.heads) for p in (self.k_proj, self.v_proj))
        k, v = self.change(k, v)
        changed = self.form.write(caches, 0, k, v, step)
        return self.form.gather(caches if changed is None else changed, 0, step)


CHANGES: dict[str, Callable[..., Any]] = {
    "activated": lambda k, v: (F.gelu(k), F.silu(v)),
    "scaled": lambda k, v: (k * 0.5, v * v),
    "normed": lambda k, v: (F.layer_norm(k, k.shape[-1:]), F.rms_norm(v, v.shape[-1:])),
    "flipped": lambda k, v: (k.flip(0).contiguous(), v.roll(1, 0)),
    "one_tensor": lambda k, v: torch.cat((k.sin(), v), 1).split((k.shape[1], v.shape[1]), 1),
    "of_each_other": lambda k, v: (k + v, k - v),
    "clamped": lambda k, v: (k.clamp(-0.4, 0.4), v.tanh()),
}


def cache_store(draw: random.Random) -> Drawn:
    """Draws writes of keys and values whose projection cannot be part of the write."""
    form, change = draw.choice(tuple(qkv_idioms.PAGED)), draw.choice(tuple(CHANGES))
    axes = qkv_idioms.Axes(
        hidden=draw.choice((16, 32)),
        num_kv_heads=draw.choice((1, 2, 3)),
        head_dim=draw.choice((8, 16, 32)),
        page_size=draw.choice((4, 8)),
        num_tokens=few(draw, 8, 10),
        dtype=draw.choice(DTYPES),
    )
    _, args = qkv_idioms.paged(form, axes)
    module = qkv_idioms.finish(Stored(qkv_idioms.PAGED[form], CHANGES[change], axes), axes)
    return module, args, f"{form} {change} {axes}"


def moe(draw: random.Random) -> Drawn:
    """Draws routed or dense mixtures, with dense or quantised weights."""
    if draw.random() < 0.15:
        step = draw.choice([*(s for s, _ in moe_dense.SPELLINGS.values()), *moe_dense.NEAR_MISSES])
        module, args = moe_dense.build(step, draw.choice((1, 2)))
        dtype = draw.choice(DTYPES)
        return module.to(dtype), tuple(a.to(dtype) for a in args), f"{step.__name__} {dtype}"
    quantised = draw.choice(tuple(moe_dequant.SPELLINGS)) if draw.random() < 0.12 else ""
    axes = {
        "ends": draw.choice(tuple(e for e in moe_idioms.ENDS if "bincount" not in e)),
        "rows": draw.choice(tuple(moe_idioms.ROWS)),
        "order": draw.choice(tuple(moe_idioms.ORDERS)),
        "combine": draw.choice(tuple(moe_idioms.COMBINES)),
        "gemm": draw.choice(("grouped", "grouped", "grouped", "batched", "einsum")),
        "layout": draw.choice(("halves", "halves", "interleaved", "separate")),
        "stored": "NK" if quantised else draw.choice(("NK", "KN")),
        "activation": draw.choice(tuple(moe_idioms.ACTIVATIONS)),
        "weigh": draw.choice(("sorted", "tokens")),
        "bias": draw.random() < 0.3,
        "quantised": quantised,
        "num_tokens": few(draw, 1, 4, 7),
        "hidden": 64 if quantised else draw.choice((16, 32)),
        "inner": 64 if quantised else draw.choice((16, 32)),
        "num_experts": draw.choice((4, 6)),
        "num_slots": draw.choice((1, 2, 3)),
        "elsewhere": draw.choice((0, 0, 0, 2)),
        "dtype": torch.bfloat16 if quantised else draw.choice(DTYPES),
    }
    if axes["gemm"] != "grouped" and axes["layout"] == "separate":
        axes["layout"] = "halves"
    return *moe_idioms.build("plain", **axes), str(axes)


def adapters(draw: random.Random) -> Drawn:
    """Draws LoRA on q, k and v."""
    dtype = draw.choice(DTYPES)
    known = draw.random()
    if known < 0.15:
        name = draw.choice(tuple(lora_idioms.IDIOMS))
        return *lora_idioms.build(name, dtype), f"{name} {dtype}"
    if known < 0.25:
        name = draw.choice(tuple(lora_bent.BENT))
        return *lora_bent.build_bent(name)[:2], name
    product = draw.choice((*lora.PRODUCTS, *lora.PRODUCTS, *lora.WHOLE))
    axes = lora.LoraAxes(
        take=draw.choice(tuple(lora.TAKES)),
        product=product,
        stored=draw.choice(("apart", "rows", "planes")),
        scale=draw.choice(("", "before", "after")),
        masked=draw.choice(lora.MASKS),
        base=draw.choice(("separate", "packed")),
        add=draw.choice(lora.ADDS),
        cache=draw.random() < 0.4,
        num_tokens=few(draw, 3, 6),
        hidden=draw.choice((32, 64)),
        rank=draw.choice((4, 8, 16)),
        num_adapters=draw.choice((3, 4)),
        num_heads=draw.choice((1, 2)),
        dtype=dtype,
    )
    return *lora.build(axes), str(axes)


def mla(draw: random.Random) -> Drawn:
    """Draws multi-head latent attention."""
    attend = draw.choice((*mla_attention.ATTENTIONS, "absorbed", "chunked"))
    forms = tuple(f for f in mla_weights.FORMS if f == "dense" or attend != "absorbed")
    axes = {
        "write": draw.choice(tuple(mla_idioms.WRITES)),
        "gather": draw.choice(tuple(mla_idioms.GATHERS)),
        "kv_a": draw.choice(("alone", "with_q")),
        "kv_b": draw.choice(("dense", "dense", *forms)),
        "q_lora": draw.random() < 0.7,
        "rope": draw.choice(tuple(mla_idioms.ROPES)),
        "norm": draw.choice(("eager", "fused")),
        "concat": draw.choice(tuple(mla_idioms.CONCATS)),
        "attention": attend,
        "num_tokens": few(draw, 1, 4, 6),
        "context": draw.choice((0, 6)),
        "hidden": 32,
        "num_heads": draw.choice((2, 4)),
        "q_rank": 32,
        "kv_rank": draw.choice((16, 32)),
        "nope": draw.choice((16, 24)),
        "rotated": draw.choice((8, 16)),
        "v_dim": draw.choice((16, 32)),
        "page_size": draw.choice((4, 8)),
        "dtype": draw.choice(DTYPES),
    }
    return *mla_idioms.build("plain", **axes), str(axes)


def mlp(draw: random.Random) -> Drawn:
    """Draws a dense MLP with norm, residual sum, and readers of its last tokens."""
    axes = dense.DenseAxes(
        norm=draw.choice(tuple(dense.NORMS)),
        form=draw.choice(dense.FORMS),
        activation=draw.choice(tuple(dense.ACTIVATIONS)),
        bias=draw.random() < 0.3,
        post=draw.choice(("none", "none", "none", *dense.NORMS)),
        scale=draw.choice((1.0, 1.0, 0.25)),
        sum=draw.choice(tuple(dense.SUMS)),
        head=draw.choice(tuple(dense.HEADS)),
        tokens=few(draw, 1, 2, 5),
        hidden=draw.choice((32, 64)),
        inner=draw.choice((64, 96)),
        dtype=draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
    )
    return *dense.build(axes), str(axes)


def wild(draw: random.Random) -> Drawn:
    """Draws attention, mixtures, latents and adapters as public code bases write them."""
    return styles.build(draw, draw.choice(DTYPES))


class CodedStep(nn.Module):
    """Runs a step of an unmodified model of transformers whose weights are codes."""

    def __init__(self, model: str, formats: tuple[str, ...], phase: str, seed: int) -> None:
        super().__init__()
        case = build_coded(model, formats, phase, seed)
        self.model, self.ids, self.given = case.model, case.args[0], case.kwargs

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, **self.given).logits


def coded(draw: random.Random) -> Drawn:
    """Draws models of transformers. The weights of each layer have a format of quantised
    checkpoints."""
    model, phase = draw.choice(tuple(MODELS)), draw.choice(("decode", "decode", "prefill"))
    formats = tuple(draw.sample(tuple(FORMATS), draw.choice((1, 2))))
    step = CodedStep(model, formats, phase, draw.randrange(100))
    return step, (step.ids,), f"{model} {formats} {phase}"


class Repeated(nn.Module):
    """Has a structure of many pieces."""

    def __init__(self, name: str, pieces: int) -> None:
        super().__init__()
        self.function, self.given = STRUCTURES[name].make(pieces)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.function(*given)


def large(draw: random.Random) -> Drawn:
    """Draws structures of many pieces: a layer whose tensors are taken apart, or one of
    STRUCTURES."""
    if draw.random() < 0.25:
        name, pieces = draw.choice(tuple(STRUCTURES)), draw.choice((8, 16, 33, 64))
        made = Repeated(name, pieces)
        return made, made.given, f"{name} {pieces}"
    tokens = draw.choice((1, 3, 16))
    how = lambda *dims: (  # noqa: E731
        draw.choice(tuple(RESTATED)),
        draw.choice(dims),
        draw.choice((1, 2, 5, 16)),
    )
    chosen = {name: how(0, 1) for name in ("x", "w", "up")} | {n: how(1, 2, 3) for n in ("k", "v")}
    module = Restated(chosen).to(draw.choice((torch.float32, torch.bfloat16)))
    dtype = module.w.dtype
    caches = [torch.randn(1, 4, 32, 16).to(dtype) for _ in range(2)]
    first = draw.randrange(16)
    args = (torch.randn(tokens, 64).to(dtype), torch.arange(first, first + tokens), *caches)
    return module, args, f"{chosen} {tokens}"


def dtypes(draw: random.Random) -> Drawn:
    """Draws models whose operands get other dtypes: scores with masks, weights of codes, or models
    of any other family."""
    kind = draw.random()
    if kind < 0.65:
        return of_dtypes.scores(draw) if kind < 0.5 else of_dtypes.coded(draw)
    return draw.choice([attention, cache_store, moe, adapters, mla, mlp, wild])(draw)


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    "attention": attention,
    "cache_store": cache_store,
    "moe": moe,
    "lora": adapters,
    "mla": mla,
    "mlp": mlp,
    "wild": wild,
    "dtypes": dtypes,
    "coded": coded,
    "large": large,
    "quantised": of_codes.build,
    "products": of_codes.products,
}
