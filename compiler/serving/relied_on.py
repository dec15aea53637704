"""Checks that transformers has everything that tilewright needs of its continuous batching engine,
before a model is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers.generation.continuous_batching import (
    continuous_api,
    input_outputs,
    model_runner,
)
from transformers.generation.continuous_batching.cache_allocators import (
    CacheAllocator,
    FullAttentionCacheAllocator,
)

from tilewright.compiler.model_cache import name_in
from tilewright.compiler.serving.allocators import (
    ALLOCATORS,
    ATTENTION,
    FullPages,
    LatentPages,
    has_latents,
    register,
)
from tilewright.compiler.serving.classes import original_class
from tilewright.compiler.serving.memory import memory_of
from tilewright.compiler.serving.paged_attention import CACHE
from tilewright.ops.contract import get_op
from tilewright.ops.runtime.device import target_of

#: Maps methods of transformers to the parameters that they must have. `|` separates the parameters
#: of different releases.
METHODS: dict[tuple[Any, str], str] = {
    (continuous_api.ContinuousMixin, "init_continuous_batching"): (
        "self generation_config continuous_batching_config workload_hints"
    ),
    (continuous_api.ContinuousBatchingManager, "warmup"): "self",
    (continuous_api.ContinuousBatchingManager, "_run_generation_loop"): (
        "self | self use_inference_mode"  # the latter since 5.24
    ),
    (model_runner.ModelRunner, "run_one_warmup"): "self model num_q_tokens max_kv_read",
    (FullAttentionCacheAllocator, "__init__"): (
        "self index config num_key_value_heads cache_dtype page_size layer_indices "
        "allow_block_sharing"
    ),
    (FullAttentionCacheAllocator, "register_cache_tensor"): (
        "self bytes_per_sector non_trash_bytes cache_tensor pool"
    ),
    (FullAttentionCacheAllocator, "_compute_blocks_needed"): (
        "self allocated_blocks past_length query_length"
    ),
    (FullAttentionCacheAllocator, "get_seqlen_k"): "self past_length query_length",
    (FullAttentionCacheAllocator, "fill_block_table"): (
        "self request_id past_length query_length block_table"
    ),
    (CacheAllocator, "free_blocks"): "self request_id no_cache",
    (CacheAllocator, "count_non_shareable_blocks"): "self source_request_id past_length",
    (CacheAllocator, "fork_blocks"): "self source_request_id dest_request_id past_length",
} | {
    (FullAttentionCacheAllocator, name): "self request_id past_length query_length"
    for name in (
        "needs_new_blocks",
        "allocate_cache_to_request",
        "get_read_indices",
        "get_write_indices",
    )
}

#: Arguments of a step that this package reads.
STEP = (
    *("input_ids", "block_table", "cache", "write_index", "read_index"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_k"),
)

#: The size of the memory with which `_differences` compares layouts.
_SMALL = {"page_size": 4, "num_blocks": 3, "tokens": 8, "columns": 1}


def reason_against(model: Any) -> str | None:
    """Returns the reason why tilewright cannot run the engine for this model; None if it can.

    If a check raises an exception, the exception is the reason.
    """
    try:
        return next(_reasons(model), None)
    except Exception as error:
        return f"transformers {transformers.__version__}: {type(error).__name__}: {error}"


def _reasons(model: Any) -> Iterator[str]:
    release = f"transformers {transformers.__version__}"
    for (owner, name), expected in METHODS.items():
        function = getattr(owner, name, None)
        if not isinstance(inspect.unwrap(function) if function else None, FunctionType):
            yield f"{release} has no function {owner.__name__}.{name}"
        found = " ".join(inspect.signature(function).parameters)  # type: ignore[arg-type]
        if found not in expected.split(" | "):
            yield f"{owner.__name__}.{name} of {release} takes ({found}), expected ({expected})"
    missing = [name for name in STEP if name not in _names_of_a_step()]
    if missing:
        yield f"a step of {release} has no {missing[0]}"
    if "_original_attn_impl" not in continuous_api.ContinuousBatchingManager.stop.__code__.co_names:
        yield f"the manager of {release} does not put the attention back"
    yield from _reasons_of_model(model)


def _names_of_a_step() -> set[str]:
    return set(input_outputs.PagedAttentionArgs.__annotations__)


def _reasons_of_model(model: Any) -> Iterator[str]:
    kind = original_class(model)
    theirs = continuous_api.ContinuousMixin.init_continuous_batching
    if getattr(kind, "init_continuous_batching", None) is not theirs:
        yield f"{kind.__name__} has a method init_continuous_batching of its own"
    if not getattr(kind, "_supports_attention_backend", False):
        yield f"{kind.__name__} does not take another attention"
    config = model.config.get_text_config()
    if has_latents(config):
        yield from _reasons_of_latents(model, config)
    register()
    yield from _differences(config, model.dtype)
    if (reason := missing_kernel(model)) is not None:
        yield reason


def missing_kernel(model: Any) -> str | None:
    """Returns why no kernel computes the attention of a model on its GPU; None if a kernel does, or
    if the model is not on a GPU.

    The PyTorch reference is no substitute: it is slow, and it waits for the GPU, so a CUDA graph
    cannot record it.
    """
    if model.device.type != "cuda":
        return None
    return kernel_obstacle(model.config.get_text_config(), model.dtype, target_of(model.device))


def kernel_obstacle(config: Any, dtype: torch.dtype, target: Any) -> str | None:
    """Returns why no kernel for `target` computes the attention of a language model; None if one
    does."""
    memory = _small_memory(config, dtype)
    for kind, owner in memory.cache_allocators.items():
        name = "mla_decode" if isinstance(owner, LatentPages) else "cache_attention"
        choice = get_op(name).choose("cuda", _decode_call(name, owner, config, dtype), target)
        if choice.lowering.name == "reference":
            return f"no kernel for {kind} of this model: {choice.rejected[-1][1]}"
    return None


def _decode_call(name: str, owner: Any, config: Any, dtype: torch.dtype) -> Any:
    """Returns the arguments of the attention of one token, on the meta device."""
    keys, values = owner.pages(owner.layer_indices[0])
    heads, width = config.num_attention_heads, keys.shape[-1]
    rest: tuple[Any, ...] = ()
    options: dict[str, Any] = {"num_sequences": 1, "scale": 1.0}
    if name == "mla_decode":
        nope = config.qk_nope_head_dim
        width = nope + config.qk_rope_head_dim
        rows = heads * (nope + config.v_head_dim)
        rest = (torch.empty(rows, owner.rank, dtype=dtype, device="meta"),)
        options["v_dim"] = config.v_head_dim
    query = torch.empty(1, heads, width, dtype=dtype, device="meta")
    table = torch.zeros(1, 1, dtype=torch.int32, device="meta")
    return get_op(name).arguments(query, keys, values, *rest, block_table=table, **options)


def _reasons_of_latents(model: Any, config: Any) -> Iterator[str]:
    """Yields a reason if a layer does not compute keys and values from latents as DeepSeek's layers
    do."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    layers = [layer for layer in model.modules() if hasattr(layer, "kv_b_proj")]
    if sorted(getattr(layer, "layer_idx", -1) for layer in layers) != list(
        range(config.num_hidden_layers)
    ):
        yield "some of its layers have latent attention, and others have not"
    for kind in {type(layer) for layer in layers}:
        expand = getattr(kind, "expand_kv", None)
        if expand is None or _code(expand) != _code(DeepseekV3Attention.expand_kv):
            yield f"{kind.__name__} does not expand latents as DeepSeek's attention does"
    for layer in layers:
        if name_in(layer.forward) != CACHE:
            yield f"{type(layer).__name__} has no argument {CACHE}"
        if hasattr(layer, "indexer"):
            yield f"{type(layer).__name__} keeps an indexer's keys beside latents"
        up = layer.kv_b_proj
        if type(up) is not nn.Linear or up.bias is not None or up.weight.dtype != model.dtype:
            yield f"the up-projection of latents is not a linear in {model.dtype}: {up}"


def _code(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_names, code.co_varnames


def _small_memory(config: Any, dtype: torch.dtype) -> Any:
    """Returns a small memory with tilewright's allocators on the meta device."""
    before = config._attn_implementation_internal
    try:
        config._attn_implementation_internal = ATTENTION
        return memory_of(config, dtype, **_SMALL)
    finally:
        config._attn_implementation_internal = before


def _differences(config: Any, dtype: torch.dtype) -> Iterator[str]:
    """Compares, for a small memory, where transformers puts the pages of each layer and where
    tilewright expects them. Yields a reason for each layer whose places differ."""
    memory = _small_memory(config, dtype)
    for kind, owner in memory.cache_allocators.items():
        if not isinstance(owner, ALLOCATORS[kind]):
            yield f"transformers {transformers.__version__} makes other allocators of {kind}"
        for layer in owner.layer_indices:
            if not _same_memory(owner, layer):
                yield (
                    f"transformers {transformers.__version__} has the pages of layer {layer} "
                    "elsewhere in its memory"
                )


def _same_memory(owner: FullPages, layer: int) -> bool:
    """Whether the first and the last page of a layer lie where transformers has them."""
    if isinstance(owner, LatentPages):  # this memory is not transformers' own
        return True
    views = owner._kv_token_views[layer]
    size = owner.tokens_per_page
    for ours, theirs in zip(owner.pages(layer), views, strict=True):
        for block in (0, ours.shape[0] - 1):
            row = theirs[block * owner.block_physical_stride :][:size]
            page = ours[block]
            if (page.shape, page.stride(), page.storage_offset()) != (
                row.shape,
                row.stride(),
                row.storage_offset(),
            ):
                return False
    return owner.write_trash_index == owner.trash_block * owner.block_physical_stride
