"""Attention over the memory of transformers' continuous batching engine, and the plan of a step,
which all layers share.

A step concatenates the tokens of several requests. In a decode step, each request has one token,
and the engine passes a block table. In a varlen step, requests have any number of tokens, with or
without past keys. Each layer writes the new keys and values with plain indexing, which `qkv_cache`
fuses with their projection, and then calls `cache_attention` once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import tilewright.ops  # noqa: F401  registers the ops
from tilewright.compiler.model_cache import NAMES, name_in
from tilewright.compiler.serving.allocators import (
    ATTENTION,
    FullPages,
    LatentPages,
    WindowPages,
)

#: The keyword argument that passes the engine's memory to the attention. The engine passes its
#: memory as `cache`, but since transformers 5.24 layers update the argument `cache` themselves, and
#: do not pass it to the attention.
MEMORY = "tilewright_memory"
#: The keyword argument that passes the plans to the attention.
PLAN = "tilewright_plan"
#: The key of new latents among the plans.
LATENTS = "latents"

#: The argument in which layers with latent attention take the cache that they update.
CACHE = name_in(DeepseekV3Attention.forward) or NAMES[0]

#: The plan for one allocator: the page and the offset of each token, and the arguments of
#: `cache_attention`.
Plan = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def add_plan(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Adds the plan of a step to the model's arguments. This is a forward pre-hook: it returns the
    new arguments, or None for calls that stay as they are, such as calls without the engine's
    memory."""
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return None
    owners = cache.cache_allocators.values()
    if not all(isinstance(owner, FullPages) for owner in owners):
        _refuse_tables(cache, kwargs)
        return None
    if cache.config._attn_implementation != ATTENTION:
        return None  # another attention updates the memory, and `FullPages.update` raises
    plans: dict[str, Any] = {
        kind: plan_of(owner, kwargs) for kind, owner in cache.cache_allocators.items()
    }
    step = {name: value for name, value in kwargs.items() if name != "cache"}
    step |= {MEMORY: cache, PLAN: plans}
    for kind, owner in cache.cache_allocators.items():
        if isinstance(owner, LatentPages):
            plans[LATENTS] = step[CACHE] = NewLatents(_slots(owner, plans[kind]))
    return args, step


def _refuse_tables(cache: PagedAttentionCache, step: dict[str, Any]) -> None:
    """Raises RuntimeError if the step has a block table and the model's attention is not a flash
    attention."""
    attention = cache.config._attn_implementation
    if step.get("block_table") is not None and "flash" not in str(attention):
        raise RuntimeError(
            f"the model's attention was changed to {attention} before tilewright's continuous "
            "batching could start: make another manager"
        )


class NewLatents:
    """Stands in for a cache, and keeps the new latents of a step until the attention reads them.

    slots: the slot of each token, `page * page size + offset`, and -1 for padding.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self.of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self,
        latent: torch.Tensor,
        rope_keys: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps and returns the latents `[1, 1, tokens, rank]` and the rotated keys of a layer."""
        self.of_layer[layer_idx] = latent, rope_keys
        return latent, rope_keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0. The model does not need the length, because the engine passes positions."""
        return 0


def _slots(owner: LatentPages, plan: Plan) -> torch.Tensor:
    page, offset, _ = plan
    return torch.where(page == owner.trash_block, -1, page * owner.tokens_per_page + offset)


def plan_of(owner: Any, step: dict[str, Any]) -> Plan:
    """Returns the plan of a step: where its tokens are written, and where the keys of each sequence
    are.

    owner: an allocator of the step's memory. step: the arguments that the engine passes to the
    model.
    """
    ends = step["cu_seq_lens_k"][owner.layer_type]
    lengths = ends[1:] - ends[:-1]
    tables = step.get("block_table")
    if tables is not None:
        return _plan_of_decode(owner, step["input_ids"].shape[1], tables[owner.index], lengths)
    return _plan_of_varlen(owner, step, lengths)


def _plan_of_decode(owner: Any, tokens: int, table: torch.Tensor, lengths: torch.Tensor) -> Plan:
    """Plans a decode step, in which sequence s has only token s, and padding has no keys. Table
    entries of -1 stand for no page, and become 0."""
    table = table.clamp(min=0)
    size = owner.tokens_per_page
    past = (lengths - 1).clamp(min=0)
    row = torch.arange(tokens, device=lengths.device)
    page = torch.where(lengths > 0, table[row, past // size], owner.trash_block)
    return (
        page,
        past % size,
        {
            "num_sequences": tokens,
            "block_table": table,
            "key_lengths": lengths,
            "cache_lengths": past,
        },
    )


def _plan_of_varlen(owner: Any, step: dict[str, Any], lengths: torch.Tensor) -> Plan:
    """Plans a varlen step: the tokens of sequence s begin at `cu_seq_lens_q[s]`. Padding follows
    the last sequence."""
    starts = step["cu_seq_lens_q"]
    tokens = step["input_ids"].shape[1]
    write, read = step["write_index"][owner.index], step["read_index"][owner.index]
    # A dynamic graph then has only one symbol for the number of tokens.
    torch._check(write.shape[0] == tokens)
    # The engine's last offset is the end of the last sequence. The op expects the end of the
    # padding there.
    rows = torch.cat([starts[:-1], torch.full_like(starts[-1:], tokens)])
    return (
        write // owner.block_physical_stride,
        write % owner.block_physical_stride,
        {
            "row_offsets": rows,
            "block_table": _block_table(owner, step, lengths, write, read),
            "key_lengths": lengths,
            "cache_lengths": lengths - (starts[1:] - starts[:-1]),
        },
    )


def _block_table(
    owner: Any,
    step: dict[str, Any],
    lengths: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
) -> torch.Tensor:
    """Returns the pages of each sequence, int32 `[sequences, pages of the longest sequence]`.

    Entries beyond the pages of a sequence belong to other sequences, and are not read.
    """
    size = owner.tokens_per_page
    if read.shape[0] == 0:  # prompts alone: their pages are those that are written
        starts = step["cu_seq_lens_q"][:-1]
        steps = torch.arange(-(-write.shape[0] // size), device=starts.device) * size
        index = (starts[:, None] + steps).clamp(max=write.shape[0] - 1)
        return (write[index] // owner.block_physical_stride).to(torch.int32)
    pages = (lengths + size - 1) // size
    columns = _columns(owner, step, lengths.shape[0], write.shape[0], read.shape[0])
    index = (pages.cumsum(0) - pages)[:, None] + torch.arange(columns, device=lengths.device)
    return read[index.clamp(max=read.shape[0] - 1)].to(torch.int32)


def _columns(owner: Any, step: dict[str, Any], sequences: int, tokens: int, read: int) -> int:
    """Returns the number of pages of the longest sequence, or an upper bound of it.

    The length of the longest sequence changes from step to step, so a compiled step that used it
    would be compiled again for each length. The engine pads the steps that it compiles. For a
    padded step, the bound follows from the length of `read`, which then has a place for each token
    and key. In layers with a window, kept pages begin up to one page before the window. For steps
    that are not padded, `read` holds just the pages.
    """
    size = owner.tokens_per_page
    padded = step["max_length_q"] == tokens  # or all tokens belong to one sequence
    if not is_compiling() or not padded:
        return int(-(-step["max_length_k"][owner.layer_type] // size))
    return read if sequences == 1 else (read + size - 1) // size + 1


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Writes keys and values into the engine's memory, and attends to all keys there.

    query, key, value: `[1, heads, tokens, head dim]`. Returns `[1, tokens, heads, head dim]`, and
    None in place of attention weights. Raises RuntimeError without the engine's memory. Raises
    ValueError if the keys or values do not have the heads that the memory holds. Also raises
    ValueError for options that are not supported: a mask, a bias, a window wider than the memory's
    and, with latents, sinks or a soft cap.
    """
    memory = kwargs.get(MEMORY)
    if not isinstance(memory, PagedAttentionCache):
        raise RuntimeError(
            "the model is used by a manager of continuous batching and was also called directly: "
            "stop the manager before you call generate() or forward(), or call "
            "tilewright.compiler.serving.disable(model)"
        )
    if position_bias is not None:
        raise ValueError("position_bias: expected None, got a bias, which the engine does not add")
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None, got a mask, which the engine ignores")
    owner: Any = memory.layer_to_allocator[module.layer_idx]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if isinstance(owner, LatentPages):
        if s_aux is not None or softcap:
            raise ValueError("attention to latents: expected neither s_aux nor softcap")
        return _attend_to_latents(owner, module, query[0], scaling, kwargs[PLAN])
    held = (owner.num_key_value_heads, owner.head_dim)
    for states in (key, value):
        if (states.shape[1], states.shape[3]) != held:
            raise ValueError(
                f"keys and values: expected {held[0]} heads of {held[1]} numbers, which the "
                f"engine's memory holds, got {states.shape[1]} of {states.shape[3]}"
            )
    page, offset, where = kwargs[PLAN][owner.layer_type]
    keys, values = owner.pages(module.layer_idx)
    keys[page, offset] = key[0].transpose(0, 1)
    values[page, offset] = value[0].transpose(0, 1)
    out = torch.ops.tilewright.cache_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        scale=scaling,
        sinks=s_aux,
        softcap=softcap or 0.0,
        **where,
        **_mask(owner, sliding_window),
    )
    return out[None], None


def _attend_to_latents(
    owner: LatentPages, module: Any, query: torch.Tensor, scaling: float, plans: dict[str, Any]
) -> tuple[torch.Tensor, None]:
    """Does what :func:`attention` does, for a layer that caches latents. query: `[heads, tokens,
    width]`."""
    new: NewLatents = plans[LATENTS]
    latent, rope_keys = new.of_layer[module.layer_idx]
    held = (owner.rank, owner.head_dim - owner.rank)
    if (latent.shape[3], rope_keys.shape[3]) != held:
        raise ValueError(
            f"latents: expected {held[0]} and {held[1]} numbers, which the engine's memory holds, "
            f"got {latent.shape[3]} and {rope_keys.shape[3]}"
        )
    _, _, where = plans[owner.layer_type]
    pool: Any = owner.pool
    torch.ops.tilewright.mla_latent_store(
        latent[0, 0].contiguous(),
        rope_keys[0, 0].contiguous(),
        pool.rows,
        None,
        new.slots,
        *owner.windows(module.layer_idx),
    )
    latents, keys = owner.pages(module.layer_idx)
    out = torch.ops.tilewright.mla_decode(
        query.transpose(0, 1),
        latents,
        keys,
        _own_part(module.kv_b_proj.weight),
        v_dim=module.v_head_dim,
        scale=scaling,
        mask="causal",
        **where,
    )
    return out[None], None


def _own_part(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight or, if it is sharded over ranks, the rows that this rank holds."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def _mask(owner: FullPages, window: int | None) -> dict[str, Any]:
    """Returns the mask arguments of a layer: a window if the model passes one or the memory has
    one."""
    held = owner.sliding_window if isinstance(owner, WindowPages) else None
    if held is not None and window is not None and window > held:
        raise ValueError(f"sliding_window: expected at most {held}, the kept window, got {window}")
    window = held if window is None else window
    return {"mask": "causal"} if window is None else {"mask": "sliding_window", "window": window}


def register() -> None:
    """Registers the attention with transformers under its name."""
    AttentionInterface.register(ATTENTION, attention)
