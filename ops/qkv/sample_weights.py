"""Sample projections: weights in all layouts and formats, biases and norms."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.formats.sample_codes import sample_codes, sample_factors
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.sampling import Sampler

LETTERS = ("q", "k", "v")


def sample_projection(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    """Returns x, weights, biases, norm weights and their options, by argument name."""
    weights = _dense(case, sampler) if case.weight_format == "dense" else _coded(case, sampler)
    return {
        **_input(case, sampler),
        **weights,
        **_norms(case, sampler),
        **_delta(case, sampler),
        **_input_norm(case, sampler),
    }


def _input(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    shape = (case.num_tokens, case.hidden)
    if not case.codes:
        return {"x": sampler.normal(*shape, dtype=case.dtype)}
    shapes = {
        "tensor": (1, 1),
        "token": (case.num_tokens, 1),
        "block": (case.num_tokens, -(-case.hidden // 128)),
    }
    scale = None
    if case.x_scale != "none":
        scale = sampler.scales(*shapes[case.x_scale], size=0.5)
    x = sampler.normal(*shape, dtype=torch.float8_e4m3fn)
    return {"x": x, "x_scale": scale, "out_dtype": case.dtype}


def _dense(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    weights = _project(case, sampler, (case.hidden,), case.hidden**-0.5)
    return {**_named("weight", weights), **_biases(case, sampler)}


def _biases(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    return _named("bias", _project(case, sampler, (), 1.0)) if case.bias else {}


def _delta(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    """Returns a delta whose columns are a part of a wider tensor, as in a stack."""
    if not case.delta:
        return {}
    kinds = 2 if case.writes_v else 1
    width = (case.num_heads + kinds * case.num_kv_heads) * case.head_dim
    return {"delta": sampler.normal(case.num_tokens, width + 8, dtype=case.dtype)[:, :width]}


def _input_norm(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.input_norm:
        kind = "layer" if case.input_norm.startswith("layer") else "rms"
        options[f"input_{kind}_norm"] = True
    if case.input_norm in ("rms", "layer", "layer_unbiased"):
        weight = sampler.normal(case.hidden, dtype=case.dtype)
        options["input_norm_weight"] = weight + (1 - case.input_norm_offset)
    if case.input_norm == "layer":
        options["input_norm_bias"] = sampler.normal(case.hidden, dtype=case.dtype)
    return options


def _named(suffix: str, tensors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    return {f"{letter}_{suffix}": t for letter, t in zip(LETTERS, tensors, strict=True)}


def _heads(case: AttentionCase) -> tuple[int, int, int]:
    return (case.num_heads, case.num_kv_heads, case.num_kv_heads)


def _project(
    case: AttentionCase, sampler: Sampler, tail: tuple[int, ...], scale: float
) -> tuple[torch.Tensor, ...]:
    heads, dim = _heads(case), case.head_dim
    if case.projection == "per_head":
        shape = (case.num_heads, 3, dim, *tail)
        return sampler.normal(*shape, dtype=case.dtype, scale=scale).unbind(1)
    if case.projection == "grouped":
        group = case.num_heads // case.num_kv_heads
        shape = (case.num_kv_heads, group + 2, dim, *tail)
        whole = sampler.normal(*shape, dtype=case.dtype, scale=scale)
        return whole[:, :group], whole[:, group], whole[:, group + 1]
    if case.projection == "packed" or (case.projection == "n_major" and not tail):
        whole = sampler.normal(sum(heads), dim, *tail, dtype=case.dtype, scale=scale)
        return whole.split(heads)
    if case.projection == "n_major":
        whole = sampler.normal(*tail, sum(heads) * dim, dtype=case.dtype, scale=scale)
        return whole.T.unflatten(0, (-1, dim)).split(heads)
    return tuple(sampler.normal(h, dim, *tail, dtype=case.dtype, scale=scale) for h in heads)


def _coded(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    sizes = [(heads * case.head_dim, case.hidden) for heads in _heads(case)]
    parts = [sample_codes(case, sampler, *size) for size in sizes]
    stored, scales, zeros = (_laid_out(case, list(part)) for part in zip(*parts, strict=True))
    per_head = case.head_dim * len(stored[0]) // sizes[0][0]
    return {
        **_named("weight", tuple(rows.unflatten(0, (-1, per_head)) for rows in stored)),
        **_named("scale", scales),
        **({} if case.zeros == "none" else _named("zero", zeros)),
        **({"factors": sample_factors(sampler, 3)} if case.factor else {}),
        **_biases(case, sampler),
    }


def _laid_out(case: AttentionCase, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the rows of q, k and v as one tensor or as three tensors, in either memory order."""
    if case.projection == "packed":
        (whole,) = _ordered(case, [torch.cat(parts)])
        return whole.split([len(part) for part in parts])
    return tuple(_ordered(case, parts))


def _ordered(case: AttentionCase, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.T.contiguous().T if case.transposed else part for part in parts]


def _norms(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    if not case.qk_norm:
        return {}
    options: dict[str, Any] = {}
    per_head = case.norm_per_head or case.norm_width == "row"
    for letter, heads in (("q", case.num_heads), ("k", case.num_kv_heads)):
        if letter in case.normed:
            shape = (heads, case.head_dim) if per_head else (case.head_dim,)
            options[f"{letter}_norm_weight"] = sampler.normal(*shape, dtype=case.dtype)
            if case.norm_bias:
                options[f"{letter}_norm_bias"] = sampler.normal(*shape, dtype=case.dtype)
    return options
