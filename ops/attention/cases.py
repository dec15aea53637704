"""Sample inputs of `cache_attention`. The cases are small and random, and together they use every
option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.sampling import Sampler

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class AttentionCase:
    """One case of `cache_attention`.

    Attributes:
        name: The name of the case.
        new_tokens: The number of queries of each sequence.
        key_lengths: The number of keys of each sequence. The last of these keys belong to the
            queries of the sequence.
        room: The number of keys of a sequence that the caches have room for.
        num_heads: The number of heads of the queries.
        num_kv_heads: The number of heads of the keys and values.
        head_dim: The width of a query and of a key.
        v_dim: The width of a value.
        dtype: The dtype of the queries.
        cache_dtype: The dtype of the caches.
        scales: The scales of an 8-bit cache: "none", "number", "heads" or "mixed" (one number for
            k, and one for each head for v).
        pool: The form of the caches: "static" (B rows of `room` keys, head-major, as in
            StaticCache), "tokens" (B rows, token-major) or "paged" (a block table over pages of
            page_size).
        page_size: The number of keys in a page.
        positions: How positions are given: "lengths" (cache_lengths), "each" (one for every token),
            "shared" (the same for all sequences) or "none".
        lengths: Whether key_lengths are passed.
        mask, window, softcap: The arguments of the op with the same names.
        sinks: Whether the call has sinks.
        attn_mask: "none", "bool", "heads" (bool, different for each head), "padding" (bool [B, 1,
            1, K]), "float" or "lowest" (float, where hidden keys have the lowest finite number).
        ragged: Whether row_offsets are passed.
        index_dtype: The dtype of indices.
    """

    name: str
    new_tokens: tuple[int, ...] = (1, 1, 1)
    key_lengths: tuple[int, ...] = (37, 5, 70)
    room: int = 80
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    v_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    scales: str = "none"
    pool: str = "static"
    page_size: int = 16
    positions: str = "lengths"
    lengths: bool = False
    mask: str = "causal"
    window: int = 0
    attn_mask: str = "none"
    softcap: float = 0.0
    sinks: bool = False
    ragged: bool = False
    index_dtype: torch.dtype = torch.int64

    @property
    def num_tokens(self) -> int:
        return sum(self.new_tokens)


CASES = (
    AttentionCase("decode"),
    AttentionCase("decode_masked", mask="none", attn_mask="bool", positions="none"),
    AttentionCase("decode_one_head_each", num_kv_heads=8, head_dim=64, v_dim=64),
    AttentionCase("decode_shared_head", num_kv_heads=1, positions="each"),
    AttentionCase("decode_shared_position", key_lengths=(9, 9, 9), positions="shared",
                  index_dtype=torch.int32),
    AttentionCase("decode_window", mask="sliding_window", window=20),
    AttentionCase("decode_chunked", mask="chunked", window=24),
    AttentionCase("decode_padding", mask="none", attn_mask="padding", positions="none"),
    AttentionCase("decode_float_mask", mask="none", attn_mask="float", positions="none"),
    AttentionCase("decode_lowest_mask", mask="none", attn_mask="lowest", positions="none"),
    AttentionCase("decode_mask_of_heads", mask="none", attn_mask="heads", positions="none"),
    AttentionCase("decode_softcap", softcap=5.0, dtype=torch.float16),
    AttentionCase("decode_sinks", sinks=True, mask="sliding_window", window=33),
    AttentionCase("decode_lengths", mask="none", lengths=True, positions="none"),
    AttentionCase("decode_paged", pool="paged", lengths=True, mask="none", positions="none",
                  index_dtype=torch.int32),
    AttentionCase("decode_paged_window", pool="paged", mask="sliding_window", window=17),
    AttentionCase("decode_fp8", cache_dtype=FP8, scales="number", pool="tokens"),
    AttentionCase("decode_fp8_heads", cache_dtype=FP8, scales="heads", pool="paged", lengths=True),
    AttentionCase("decode_fp8_mixed", cache_dtype=FP8, scales="mixed"),
    AttentionCase("prefill_fp8", new_tokens=(70, 70), key_lengths=(70, 75), num_heads=4,
                  cache_dtype=FP8, scales="mixed"),
    AttentionCase("no_keys", key_lengths=(0, 0, 0), room=0, mask="none", positions="none"),
    AttentionCase("decode_wide", head_dim=256, v_dim=256, num_heads=4, key_lengths=(20, 5, 33),
                  room=40),
    AttentionCase("decode_odd_widths", head_dim=80, v_dim=48, num_heads=6, num_kv_heads=3),
    AttentionCase("several_tokens", new_tokens=(4, 4, 4), pool="tokens"),
    AttentionCase("several_tokens_masked", new_tokens=(4, 4, 4), mask="none", attn_mask="bool",
                  positions="none"),
    AttentionCase("several_ragged", new_tokens=(3, 0, 6), key_lengths=(37, 4, 70), ragged=True,
                  pool="paged", lengths=True),
    AttentionCase("prefill", new_tokens=(70, 70), key_lengths=(70, 70), num_heads=4,
                  positions="none"),
    AttentionCase("prefill_prefix", new_tokens=(40, 40), key_lengths=(40, 75), num_heads=4),
    AttentionCase("prefill_masked", new_tokens=(70, 70), key_lengths=(70, 70), num_heads=4,
                  mask="none", attn_mask="bool", positions="none", room=140),
    AttentionCase("prefill_padding", new_tokens=(140, 140), key_lengths=(140, 140), num_heads=2,
                  num_kv_heads=1, attn_mask="padding", positions="none", room=150),
    AttentionCase("prefill_heads_mask", new_tokens=(70, 70), key_lengths=(70, 70), num_heads=4,
                  mask="none", attn_mask="heads", positions="none"),
    AttentionCase("prefill_window_softcap", new_tokens=(70, 70), key_lengths=(70, 75), num_heads=4,
                  mask="sliding_window", window=30, softcap=10.0),
    AttentionCase("prefill_sinks", new_tokens=(70,), key_lengths=(70,), num_heads=4, sinks=True),
    AttentionCase("prefill_ragged", new_tokens=(65, 0, 7), key_lengths=(70, 4, 7), ragged=True,
                  pool="paged", num_heads=4),
    AttentionCase("encoder", new_tokens=(50, 50), key_lengths=(50, 50), room=50, mask="none",
                  positions="none", num_heads=4, num_kv_heads=4),
    AttentionCase("no_tokens", new_tokens=(0, 0), key_lengths=(4, 9)),
    AttentionCase("single_precision", dtype=torch.float32),
    AttentionCase("double", dtype=torch.float64, new_tokens=(2, 2, 2), sinks=True, softcap=3.0),
)  # fmt: skip


def sample_attention(case: AttentionCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `cache_attention` by name. Hidden keys have large values, so that a
    mistake changes the result visibly."""
    sampler = Sampler(device, seed)
    batch = len(case.new_tokens)
    made: dict[str, Any] = {
        "q": sampler.normal(case.num_tokens, case.num_heads, case.head_dim, dtype=case.dtype),
        "scale": case.head_dim**-0.5,
        "mask": case.mask,
        "window": case.window,
        "softcap": case.softcap,
        **_pool(case, sampler),
        **_positions(case, sampler),
    }
    if case.ragged:
        offsets = torch.tensor((0, *case.new_tokens)).cumsum(0)
        made["row_offsets"] = offsets.to(case.index_dtype).to(device)
    else:
        made["num_sequences"] = max(batch, 1)
    if case.lengths:
        made["key_lengths"] = _index(case, sampler, case.key_lengths)
    if case.attn_mask != "none":
        made["attn_mask"] = _mask(case, sampler)
    if case.sinks:
        made["sinks"] = sampler.normal(case.num_heads, dtype=case.dtype)
    return made


def _index(case: AttentionCase, sampler: Sampler, numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=case.index_dtype, device=sampler.device)


def _positions(case: AttentionCase, sampler: Sampler) -> dict[str, torch.Tensor]:
    runs = zip(case.key_lengths, case.new_tokens, strict=True)
    starts = [length - new for length, new in runs]
    if case.positions == "lengths":
        return {"cache_lengths": _index(case, sampler, starts)}
    if case.positions == "none":
        return {}
    numbered = [
        start + i for start, new in zip(starts, case.new_tokens, strict=True) for i in range(new)
    ]
    if case.positions == "shared":
        numbered = numbered[: case.new_tokens[0]]
    return {"positions": _index(case, sampler, numbered)}


def _pool(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    """Returns k and v with their scales, and the block table if there is one."""
    batch, rows = max(len(case.new_tokens), 1), case.room
    made: dict[str, Any] = {}
    if case.pool == "paged":
        columns = -(-case.room // case.page_size)
        pages = sampler.permutation(batch * columns + 2)[: batch * columns]
        made["block_table"] = pages.view(batch, columns).to(case.index_dtype).to(sampler.device)
        batch, rows = batch * columns + 2, case.page_size
    for name, width in (("k", case.head_dim), ("v", case.v_dim)):
        tensor = sampler.normal(batch, case.num_kv_heads, rows, width, dtype=torch.float32)
        tensor = tensor.transpose(1, 2)
        if case.pool != "paged":
            for b, length in enumerate(case.key_lengths):
                tensor[b, length:] = 300.0
        tensor = tensor.to(case.cache_dtype or case.dtype)
        made[name] = tensor.contiguous() if case.pool != "static" else tensor
        if case.scales != "none":
            each = case.scales == "heads" or (case.scales == "mixed" and name == "v")
            shape = (case.num_kv_heads,) if each else ()
            scale = sampler.normal(*shape, dtype=torch.float32).abs() + 0.5
            made[f"{name}_scale"] = scale.reshape(shape)
    return made


def _mask(case: AttentionCase, sampler: Sampler) -> torch.Tensor:
    """Returns a causal mask in which some more keys are hidden. The second sequence attends only to
    its third key and later keys, as after left padding."""
    shape = (len(case.new_tokens), 1, case.new_tokens[0], case.room)
    if case.attn_mask == "heads":
        shape = (shape[0], case.num_heads, *shape[2:])
    if case.attn_mask == "padding":
        shape = (shape[0], 1, 1, case.room)
    keys = torch.arange(case.room)
    seen = torch.zeros(shape, dtype=torch.bool)
    for b, (length, new) in enumerate(zip(case.key_lengths, case.new_tokens, strict=True)):
        rows = torch.arange(length - new, length) if shape[2] > 1 else torch.tensor([length - 1])
        seen[b] = (keys[None] <= rows[:, None]) & (keys >= (2 if b == 1 else 0))
    if case.attn_mask != "padding":
        drawn = sampler.normal(*shape, dtype=torch.float32).cpu()
        seen &= (drawn < 1) | (keys < 4)
    if case.attn_mask in ("float", "lowest"):
        hidden = float("-inf") if case.attn_mask == "float" else torch.finfo(case.dtype).min
        added = sampler.normal(*shape, dtype=case.dtype).cpu()
        return torch.where(seen, added, hidden).to(case.dtype).to(sampler.device)
    return seen.to(sampler.device)
