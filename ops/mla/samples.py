"""Sample inputs of the MLA ops for the cases in `cases.py`. The inputs are small and random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.ops.attention import block_lists
from tilewright.ops.attention.block_lists import MaskBlocksArguments
from tilewright.ops.attention.cases import sample_attention
from tilewright.ops.cache.addressing import SLOT_FORMS
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.sample_codes import CodedCase, sample_codes, sample_factors
from tilewright.ops.mla.cases import BranchCase, DecodeCase, LatentCase, PrefillCase
from tilewright.ops.mla.prefill.chunk_plan import cut
from tilewright.ops.sampling import Sampler, sample_places


def sample_store(case: LatentCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `mla_latent_store` by name."""
    sampler = Sampler(device, seed)
    places = _places(case, sampler)
    if not case.by_position and case.slots != "block_table":
        places.pop("positions", None)
    return {
        **_latents(case, sampler),
        **_pool(case, sampler),
        **_write_places(case, places),
        **_rope(case, sampler),
    }


def sample_prefill(case: PrefillCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `mla_prefill` by name."""
    sampler = Sampler(device, seed)
    places = _places(case, sampler)
    values = {
        "q": sampler.normal(
            case.num_tokens, case.num_heads, case.nope + case.rope_dim, dtype=case.dtype
        ),
        **_latents(case, sampler),
        **sample_weight(case, sampler),
        **_rope(case, sampler),
        "rope_on": case.rope_on if case.rope_style != "none" else "qk",
        "v_dim": case.v_dim,
        "scale": (case.nope + case.rope_dim) ** -0.5,
        "mask": case.mask,
        "window": case.window,
        "attention_dtype": case.attention_dtype,
        "keys": case.keys,
    }
    if case.keys != "given":
        values |= {**_pool(case, sampler), **_write_places(case, places)}
    if case.weight == "codes":
        codes, scale = fp8_block.quantize_rows(values["latent"])
        values |= {"latent": codes, "latent_scale": scale}
    values |= _queries(case, places) | _keys(case, places, sampler)
    if case.attn_mask != "none":
        values["attn_mask"] = _mask(case, sampler)
        if case.listed:
            given = MaskBlocksArguments(values["attn_mask"])
            values["mask_blocks"] = block_lists.reference(given)
    return values


def sample_decode(case: DecodeCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `mla_decode` by name."""
    sampler = Sampler(device, seed)
    width, entry = case.nope + case.rope_dim, case.rank + case.rope_dim
    made = sample_attention(replace(case, head_dim=entry, v_dim=1), device, seed)
    for name in ("v", "softcap"):
        del made[name]
    parts = made.pop("k").squeeze(2).split((case.rank, case.rope_dim), dim=-1)
    latent, rope_keys = parts if case.joined else (part.contiguous() for part in parts)
    return made | {
        "q": sampler.normal(case.num_tokens, case.num_heads, width, dtype=case.dtype),
        "latent": latent,
        "rope_keys": rope_keys,
        **_decode_weight(case, sampler),
        "v_dim": case.v_dim,
        "scale": width**-0.5,
        **dict(case.rounding),
    }


def sample_weight(case: PrefillCase | DecodeCase, sampler: Sampler) -> dict[str, Any]:
    rows = case.num_heads * (case.nope + case.v_dim)
    dense = sampler.normal(rows, case.rank, dtype=case.dtype, scale=case.rank**-0.5)
    if case.weight == "dense":
        return {"kv_b_weight": dense}
    if case.weight == "apart":
        per_head = dense.unflatten(0, (case.num_heads, -1))
        k_weight, v_weight = per_head.split((case.nope, case.v_dim), dim=1)
        return {"kv_b_weight": k_weight.contiguous(), "v_weight": v_weight.mT.contiguous().mT}
    block = [fp8_block.BLOCK] * 2 if not isinstance(case, BranchCase) else [case.granularity] * 2
    codes, scale = fp8_block.quantize_blocks(dense, (block[0], block[1]))
    values = {"kv_b_weight": codes, "kv_b_scale": scale, "scale_block": block}
    if case.weight == "quantized":
        values |= {"quantize_latent": True, "latent_scale_cap": 1200.0}
    return values


def _decode_weight(case: DecodeCase, sampler: Sampler) -> dict[str, Any]:
    if case.codes is None:
        made = sample_weight(case, sampler)
        return made | ({"weight_format": "fp8"} if case.weight == "fp8" else {})
    rows = case.num_heads * (case.nope + case.v_dim)
    return coded_weight(replace(case.codes, dtype=case.dtype), sampler, rows, case.rank)


def coded_weight(codes: CodedCase, sampler: Sampler, rows: int, rank: int) -> dict[str, Any]:
    """Returns the arguments of `mla_decode` for a weight [rows, rank] of codes."""
    data, scale, zero = sample_codes(codes, sampler, rows, rank)
    return {
        "kv_b_weight": data,
        "kv_b_scale": scale,
        "kv_b_zero": None if codes.zeros == "none" else zero,
        "kv_b_factor": sample_factors(sampler, 1) if codes.factor else None,
        **codes.format_options,
    }


def sample_branch(case: BranchCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `mla_prefill_branch_fp8` by name."""
    sampler = Sampler(device, seed)
    places = _places(case, sampler)
    latents, pool = _latents(case, sampler), _pool(case, sampler)
    weight = sample_weight(case, sampler)
    width = case.nope + case.rope_dim
    table = sampler.normal(case.num_pages * case.page_size, case.rope_dim, dtype=torch.float32)
    return {
        "q": sampler.normal(case.num_tokens, case.num_heads, width, dtype=case.dtype),
        "latents": torch.cat((latents["latent"], latents["k_rope"]), 1),
        "input_row_offsets": places["row_offsets"],
        "freqs_cis": table,
        "kv_norm_gamma": latents["norm_weight"],
        "blocks": pool["latent_cache"],
        "cache_lengths": places["cache_lengths"],
        "lookup_table": places["lookup_table"],
        "layer_idx": 1,
        "scale": width**-0.5,
        "epsilon": 1e-6,
        **_chunks(case, sampler),
        "kv_b_proj": weight["kv_b_weight"],
        "kv_b_proj_scale": weight["kv_b_scale"],
        "v_dim": case.v_dim,
        "mask": case.mask,
        "window": case.window,
        "rope_style": case.rope_style,
        "granularity": case.granularity,
        "attention_dtype": case.attention_dtype,
    }


def _chunks(case: BranchCase, sampler: Sampler) -> dict[str, Any]:
    lengths = torch.tensor(case.cached_tokens, dtype=torch.int64)
    offsets = torch.tensor((0, *case.new_tokens)).cumsum(0)
    page = case.page_size if case.buffer_pages else 1
    total = int(offsets[-1] + lengths.sum())
    chunks = -(-total // case.buffer_size) + 2 if case.buffer_size else 1
    size = case.buffer_size or max(total, 1)
    rows, starts, counts = cut(offsets, lengths, size, chunks, page)
    tensors = {"buffer_row_offsets": rows, "cache_offsets": starts}
    if not case.buffer_size:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
    made = {n: t.to(case.index_dtype).to(sampler.device) for n, t in tensors.items()}
    return made | {"buffer_length": counts.tolist()}


def _latents(case: LatentCase, sampler: Sampler) -> dict[str, Any]:
    joint = sampler.normal(
        case.num_tokens, case.rank + case.rope_dim, dtype=case.dtype, scale=case.magnitude
    )
    norm = case.norm_dtype or case.dtype
    weight = sampler.normal(case.rank, dtype=norm) if case.norm else None
    return {
        "latent": joint[:, : case.rank],
        "k_rope": joint[:, case.rank :],
        "norm_weight": weight,
    }


def _pool(case: LatentCase, sampler: Sampler) -> dict[str, Any]:
    rank, width, size = case.rank, case.rank + case.rope_dim, case.page_size
    pages = len(case.new_tokens) if case.pool == "static" else case.num_pages
    rope_cache = None
    if case.pool == "joint":
        cache = sampler.normal(pages, size, width, dtype=case.dtype)
        entries = cache.unsqueeze(2)
    elif case.pool == "layers":
        cache = sampler.normal(pages, 1, 3, size, 1, width, dtype=case.dtype)
        entries = cache[:, 0, 1]
    else:
        cache, rope_cache = (
            sampler.normal(pages, 1, size, part, dtype=case.dtype) for part in (rank, case.rope_dim)
        )
    if rope_cache is not None:
        windows = [CacheWindow.static_cache(base) for base in (cache, rope_cache)]
    else:
        windows = [CacheWindow.of(part, cache) for part in (entries[..., :rank],
                                                            entries[..., rank:])]  # fmt: skip
    return {
        "latent_cache": cache,
        "rope_cache": rope_cache,
        "latent_window": windows[0].to_ints(),
        "rope_window": windows[1].to_ints(),
    }


def _rope(case: LatentCase, sampler: Sampler) -> dict[str, Any]:
    if case.rope_style == "none":
        return {}
    width = case.rope_dim if case.table_width == "full" else case.rope_dim // 2
    rows = case.num_pages * case.page_size if case.by_position else max(case.num_tokens, 1)
    # The tables are not true rotations: every column differs, so that a wrong column changes the
    # result.
    table = sampler.normal(rows, 2 * width, dtype=torch.float32)
    cos, sin = table.chunk(2, dim=1) if not case.by_position else (table[:, ::2], table[:, 1::2])
    return {
        "cos": cos,
        "sin": sin,
        "rope_style": case.rope_style,
        "rope_by_position": case.by_position,
    }


def _places(case: LatentCase, sampler: Sampler) -> dict[str, Any]:
    """Returns the places of new tokens and of keys, in all forms of addressing."""
    if case.pool == "static":
        start, new = case.cached_tokens[0], case.new_tokens[0]
        positions = torch.arange(start, start + new, device=sampler.device)
        return {"slot_mapping": positions, "positions": positions}
    places = sample_places(case, sampler)
    positions = places["positions"]
    page = places["lookup_table"][places["sequence_ids"], positions // case.page_size]
    places["slot_mapping"] = page * case.page_size + positions % case.page_size
    places |= {name: places[name].to(case.index_dtype) for name in SLOT_FORMS["ragged"]}
    return {name: tensor.to(sampler.device) for name, tensor in places.items()}


def _write_places(case: LatentCase, places: dict[str, Any]) -> dict[str, Any]:
    names = {*SLOT_FORMS.get(case.slots, ())}
    if case.by_position and case.slots != "ragged":
        names.add("positions")
    given = {name: places[name] for name in names}
    return {"slots": case.slots, "slot_mapping": None, **given}


def _queries(case: PrefillCase, places: dict[str, Any]) -> dict[str, Any]:
    if case.runs:
        values: dict[str, Any] = {"num_sequences": len(case.new_tokens)}
        if case.keys == "pages":
            values["positions"] = places["positions"]
        return values
    values = {"row_offsets": places["row_offsets"]}
    if case.keys != "given":
        values["cache_lengths"] = places["cache_lengths"]
    return values


def _keys(case: PrefillCase, places: dict[str, Any], sampler: Sampler) -> dict[str, Any]:
    if case.keys not in ("table", "slots"):
        return {}
    lengths = torch.tensor(
        [n + c for n, c in zip(case.new_tokens, case.cached_tokens, strict=True)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counted = {"key_offsets": offsets.to(case.index_dtype).to(sampler.device)}
    if case.keys == "slots":
        table = places["lookup_table"].long().cpu()
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.arange(int(offsets[-1])) - offsets[sequence]
        page = table[sequence, place // case.page_size]
        slots = page * case.page_size + place % case.page_size
        return counted | {"key_slots": slots.to(sampler.device)}
    values = {"lookup_table": places["lookup_table"]}
    if case.ragged_keys:
        return values | counted | {"num_keys": int(offsets[-1])}
    # All entries of the table are read. An entry without tokens has the number of an arbitrary
    # page, to which no query attends.
    table = places["lookup_table"]
    table = torch.where(table.long() >= case.num_pages, 0, table.long()).to(table.dtype)
    return {"lookup_table": table}


def _mask(case: PrefillCase, sampler: Sampler) -> torch.Tensor:
    batch, queries, keys = len(case.new_tokens), case.new_tokens[0], case.page_size
    seen = sampler.normal(batch, 1, queries, keys, dtype=torch.float32) > -0.5
    seen[0, 0, -1] = False
    if case.attn_mask == "bool":
        return seen
    numbers = sampler.normal(batch, case.num_heads, queries, keys, dtype=case.dtype)
    return numbers.masked_fill(~seen, float("-inf"))
